"""Llama folders against numbers of transformers in float64, and odd ones back byte for byte."""

import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import tape_jax as tape
from tape_jax._src.pretrained import folder as folders
from tests.library.pretrained.folders import (
    MHA,
    SCALINGS,
    SINGLE,
    as_type,
    change_tensors,
    checkpoint_files,
)
from tests.selection import mostly_slow


class TestAgainstTransformers:
    @pytest.mark.usefixtures("x64")
    @pytest.mark.parametrize(
        "case", mostly_slow(sorted({n.split("/")[0] for n in SCALINGS.files}), "both_forms")
    )
    def test_every_form_of_rotary_parameters(self, case, copy):
        path = copy()
        (path / "config.json").write_text(str(SCALINGS[f"{case}/config"]))
        model, variables = tape.from_pretrained(path, dtype="float64")
        logits = model.apply(variables, jnp.asarray(np.load(MHA / "expected.npz")["input_ids"]))
        # Beyond the trained length, torch rounds the dynamic base to float32.
        tolerance = 1e-6 if case == "legacy_dynamic" else 1e-12
        np.testing.assert_allclose(logits[:, -2:], SCALINGS[f"{case}/logits"], atol=tolerance)


class TestRoundTrip:
    @pytest.mark.mostly_slow
    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
    def test_every_value_of_narrow_types(self, copy, tmp_path, dtype):
        """Subnormal numbers, infinities and NaNs among them; also by way of float32."""
        path = copy(MHA, pad_token_id=7, task_specific_params=[1])
        (path / "tokenizer.model").write_bytes(b"\0\1")
        (path / "notes.txt").write_text("not taken along")

        def change(tensors):
            as_type(dtype)(tensors)
            bits = np.arange(160 * 64, dtype=np.uint16) * 7
            tensors["model.embed_tokens.weight"] = bits.view(dtype).reshape(160, 64)

        change_tensors(path, change)
        model, variables = tape.from_pretrained(path)
        tape.save_pretrained(tmp_path / "new", model, variables, like=path)
        wanted = checkpoint_files(path)
        del wanted["notes.txt"]
        assert checkpoint_files(tmp_path / "new") == wanted

        def finite(tensors):
            table = tensors["model.embed_tokens.weight"]
            table[~np.isfinite(table.astype(np.float32))] = 0

        change_tensors(path, finite)
        model, variables = tape.from_pretrained(path, dtype="float32")
        tape.save_pretrained(tmp_path / "wide", model, variables, like=path)
        assert (tmp_path / "wide" / SINGLE).read_bytes() == (path / SINGLE).read_bytes()

    def test_foreign_order_metadata_and_what_is_not_read(self, copy, tmp_path):
        """A file that the safetensors package would write otherwise, with a head that is tied."""
        path = copy(MHA, tie_word_embeddings=True)
        tensors = safetensors.numpy.load_file(path / SINGLE)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
        ordered = dict(sorted(tensors.items(), reverse=True))
        specs = {name: folders.Tensor("F32", x.shape) for name, x in ordered.items()}
        header = folders.make_header(specs, {"z": "1", "format": "pt", "a": "é"})
        header = (len(header)).to_bytes(8, "little") + header[8:] + b" " * 8
        (path / SINGLE).write_bytes(header + b"".join(x.tobytes() for x in ordered.values()))
        model, variables = tape.from_pretrained(path, scan_layers=False)
        assert "head" not in variables["params"]
        tape.save_pretrained(tmp_path / "new", model, variables, like=path)
        assert checkpoint_files(tmp_path / "new") == checkpoint_files(path)


def test_safetensors_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(NotImplementedError, match=r"pip install 'tape-jax\[pretrained\]'"):
        tape.from_pretrained(MHA)
