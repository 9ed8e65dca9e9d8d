"""`strangers`: packages that are planted where core/optional.py looks."""

import sys

import pytest

from core import optional


@pytest.fixture
def strangers(tmp_path, monkeypatch):
    """A folder of packages in front of everything else; answers are looked for afresh."""

    def plant(name: str, source: str) -> None:
        file = tmp_path / name.replace(".", "/") / "__init__.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
        optional._module.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    optional._module.cache_clear()
    yield plant
    optional._module.cache_clear()
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("apex", "amp_C", "tensorboardX"):
            del sys.modules[name]
