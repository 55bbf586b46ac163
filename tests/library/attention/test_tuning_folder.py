"""Where measurements are kept, if there is no such place."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from tape_jax import attention_plan, tune
from tape_jax._src.attention.tuning import choice, store


@pytest.mark.parametrize("value", ["x" * 300, "~nobody_of_this_name/x", None, "file"])
def test_a_folder_that_cannot_be(monkeypatch, tmp_path, capsys, value):
    """Calls go on, the command says why it does not. The last is a file."""
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    if value is None:
        for name in ("TAPE_JAX_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        nowhere = store.Path("~nobody_of_this_name")
        monkeypatch.setattr(store.Path, "home", nowhere.expanduser)
    else:
        monkeypatch.setenv("TAPE_JAX_CACHE", value)
    choice.forget()
    x = jnp.ones((1, 8, 1, 4))
    assert attention_plan(x, x, x).measured is None
    with pytest.raises(SystemExit) as stopped:
        tune.main(["--lengths", "16", "--head-dims", "8"])
    assert stopped.value.code == 1
    assert "tape_jax.tune: measurements cannot be kept: " in capsys.readouterr().err
    choice.forget()
