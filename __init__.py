"""Not a package, but what `import treeattn` finds in a program beside a clone that is named treeattn.

Without this file Python would make an empty namespace of the folder. The import gets the package inside.
"""

if __name__ == "treeattn":
    import importlib.util
    import sys
    from pathlib import Path

    _spec = importlib.util.spec_from_file_location(__name__, Path(__file__).parent / "treeattn/__init__.py")
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[__name__] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[__name__])
