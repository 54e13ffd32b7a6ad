"""The errors of this package: what catches them, and with which code the command leaves."""

import pickle

import pytest

import treeattn
from treeattn import cli, errors


def test_every_error_has_one_exit_code():
    """Bad arguments or input are 2, a wait that reached its limit is 124, and a dead peer is neither."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert {kind.__name__: kind.exit_code for kind in kinds} == {
        "TreeattnError": 1,
        "ArgumentError": 2,
        "ScheduleError": 2,
        "RestrictionError": 2,
        "BackendError": 1,
        "MissingPackageError": 1,
        "StateError": 1,
        "TransportError": 2,
        "SharingError": 2,
        "PeerError": 1,
        "PeerTimeoutError": 124,
    }


@pytest.mark.parametrize(
    ("raised", "code"),
    [(treeattn.PeerError("rank 1 has ended"), 1), (treeattn.ArgumentError("no"), 2), (OSError("disk"), 1)],
)
def test_the_command_leaves_with_the_code_of_the_error(raised, code, monkeypatch, capsys):
    def fails(arguments):
        raise raised

    monkeypatch.setattr(cli, "_run", fails)
    with pytest.raises(SystemExit) as left:
        cli.main([])
    assert left.value.code == code
    assert capsys.readouterr().err == f"treeattn: {raised}\n"


def test_what_callers_caught_before_they_still_catch():
    assert issubclass(treeattn.PeerTimeoutError, treeattn.TransportError)
    assert issubclass(treeattn.StateError, RuntimeError)


def test_a_message_is_one_line_whatever_it_quotes():
    """Of an input with control characters, or of any length; the remedy stands at its end."""
    said = str(treeattn.ArgumentError(f"name {'x' * 9999}\x1b[2J\n: take another"))
    assert said.startswith("name xxx")
    assert said.endswith(r"x\x1b[2J\n: take another")
    assert len(said) < 1600
    again = pickle.loads(pickle.dumps(treeattn.ArgumentError(said)))
    assert str(again) == said
    assert str(treeattn.ArgumentError("größer: 3 µs")) == "größer: 3 µs"
