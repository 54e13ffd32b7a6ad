"""How long a fuzzer looks: `make fuzz` at the same cases always, FUZZ=100 at a hundred times as many new."""

import os

from hypothesis import HealthCheck, Phase, settings

FUZZ = int(os.environ.get("TREEATTN_FUZZ", "1"))


def fuzzed(count: int, **more: int) -> settings:
    """Decorates a test with `given`, or is the `settings` of a state machine."""
    return settings(
        max_examples=count * FUZZ,
        derandomize=FUZZ == 1,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        **more,
    )


def new_seed() -> int:
    """Of what draws by itself."""
    return 0 if FUZZ == 1 else int.from_bytes(os.urandom(4))
