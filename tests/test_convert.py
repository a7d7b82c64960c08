"""Folders of published models in and out: identity there and back, and a refusal for all that has no place here."""

import errno
import json
import shutil
from unittest.mock import Mock

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from normexp import cell, commandline
from normexp.convert import FAMILIES, export_folder, files, import_folder, load_model, names
from normexp.convert.__main__ import main
from normexp.fields import UserError
from tests import hub, tiny
from tests.tiny import load

KINDS = list(FAMILIES)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder of each family, as save_pretrained leaves it."""
    root = tmp_path_factory.mktemp("published")
    for kind in KINDS:
        hub.model(kind).save_pretrained(root / kind)
    return root


def rewritten(folder, out, weights=None, **changes):
    """A copy of a folder, with other keys in its config.json (None: left out), and perhaps other weights."""
    out.mkdir()
    config = json.loads((folder / "config.json").read_text()) | changes
    (out / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    save_file(weights or load_file(folder / "model.safetensors"), out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_is_the_identity(kind, published, tmp_path):
    """Of the weights to the bit, and of every key of the config that changes a logit; transformers reads the result."""
    transformers = pytest.importorskip("transformers")
    import_folder(published / kind, tmp_path / "ours")
    assert export_folder(tmp_path / "ours", tmp_path / "theirs") == kind
    before, after = (load_file(folder / "model.safetensors") for folder in (published / kind, tmp_path / "theirs"))
    assert set(before) == set(after)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    first, second = (transformers.AutoConfig.from_pretrained(f) for f in (published / kind, tmp_path / "theirs"))
    silent = {"bos_token_id", "eos_token_id", "pad_token_id", "dtype", "architectures", "_name_or_path", "rope_theta"}
    silent |= {"use_bidirectional_attention"}  # None or false
    theirs, ours = ({k: v for k, v in c.to_dict().items() if k not in silent} for c in (first, second))
    if kind == "gpt2":
        assert (theirs.pop("n_inner"), ours.pop("n_inner")) == (None, 96)  # four times the width
    ours = {key: value for key, value in ours.items() if key in theirs or key not in ("hidden_act", "head_dim")}
    assert ours == theirs
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", attn_implementation="eager").eval()
    original = transformers.AutoModelForCausalLM.from_pretrained(published / kind, attn_implementation="eager").eval()
    assert torch.equal(loaded(hub.TOKENS).logits, original(hub.TOKENS).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_the_maps_are_each_others_inverse(kind):
    """On dicts of tensors, in the type they have, and without a change to the dict that is given."""
    family, theirs = FAMILIES[kind], hub.model(kind).bfloat16()
    state = {name: p.detach() for name, p in theirs.named_parameters()}
    kept, tied = dict(state), theirs.config.tie_word_embeddings
    back = names.to_theirs(family.names, names.to_ours(family.names, state, tied), tied)
    assert set(back) == set(state) == set(kept)
    assert all(back[name].dtype == torch.bfloat16 and torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize(("recipe", "changes"), [
    ("gpt2", ["model.mlp=relu", "model.rotary_base=500", "model.expert_mlp=gelu"]), ("llama", []),
    ("llama", ["model.head_width=6", "model.tied=true"]),
    ("gemma2", ["model.query_scale=0.25", "model.local_layers=all", "model.window=4"]), ("gemma2", ["model.window=0"]),
    ("olmo2", []),
])  # fmt: skip
def test_a_trained_run_becomes_a_model_of_transformers(recipe, changes, tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    loaded = load(f"recipe={recipe}", *tiny.SHORT, "model.heads=2", *changes)
    folder = cell.run(loaded, cell.open_source(loaded), None, print, bar=False)
    assert main([str(folder.path), "out"]) == 0
    assert f"out: a {recipe} for transformers" in capsys.readouterr().out
    theirs = transformers.AutoModelForCausalLM.from_pretrained("out", attn_implementation="eager").eval()
    ours, tokens = load_model(folder.path), torch.randint(0, 65, (2, 16))
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=1e-5, rtol=1e-5)  # sums in another order
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 65


@pytest.mark.parametrize("recipe", ["gpt2", "llama"])
def test_a_size_of_ours_stays_in_its_family(recipe):
    """What it says of experts, of which there are none, counts for nothing."""
    for size in ("gpt2", "small"):
        values = commandline.compose([f"recipe={recipe}", f"model={size}", "model.expert_mlp=gelu"]).values
        assert files._family(values).model_type == recipe


def test_a_run_older_than_a_field_is_what_it_was(published, tmp_path):
    """And a field that every run had is not made up."""
    import_folder(published / "gpt2", tmp_path / "run")
    expected = load_model(tmp_path / "run")(hub.TOKENS)
    export_folder(tmp_path / "run", tmp_path / "before")
    path = tmp_path / "run" / "config.yaml"
    config = yaml.safe_load(path.read_text())
    for field in ("norm.kernel", "norm.gain_offset", "model.kv_heads", "model.expert_mlp", "model.quant"):
        del config[field.split(".")[0]][field.split(".")[1]]
    path.write_text(yaml.safe_dump(config))
    assert torch.equal(load_model(tmp_path / "run")(hub.TOKENS), expected)
    export_folder(tmp_path / "run", tmp_path / "after")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "after" / name).read_bytes() == (tmp_path / "before" / name).read_bytes()
    path.write_text(path.read_text().replace("  mlp_ratio: 4.0\n", ""))
    with pytest.raises(UserError, match=r"model.mlp_ratio: is missing"):
        load_model(tmp_path / "run")


def test_the_command_prints_overrides_that_make_the_model(published, tmp_path, capsys):
    """And leaves weights that it takes strictly; a value that is the recipe's is not repeated."""
    assert main([str(published / "llama"), str(tmp_path / "weights.safetensors")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        "recipe=llama model.width=24 model.depth=3 model.context=32 model.mlp_ratio=2.5 model.rotary_base=700.0"
    )
    loaded = load(*line.split())
    state = load_file(tmp_path / "weights.safetensors")
    model = cell.Transformer(loaded.model, hub.VOCABULARY, norm=loaded.norm, placement=loaded.placement).eval()
    model.load_state_dict(state)
    torch.testing.assert_close(model(hub.TOKENS), hub.model("llama")(hub.TOKENS).logits, atol=1e-5, rtol=1e-5)


def test_a_tied_head_is_there_for_a_strict_load(published, tmp_path):
    import_folder(published / "gpt2", tmp_path / "weights.safetensors")
    state = load_file(tmp_path / "weights.safetensors")
    assert torch.equal(state["head.weight"], state["embed.token.weight"])


def test_weights_keep_their_type_and_become_float32_where_they_are_loaded(published, tmp_path):
    weights = {name: t.bfloat16() for name, t in load_file(published / "llama" / "model.safetensors").items()}
    import_folder(rewritten(published / "llama", tmp_path / "theirs", weights), tmp_path / "ours")
    export_folder(tmp_path / "ours", tmp_path / "back")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert all(after[name].dtype == torch.bfloat16 and torch.equal(after[name], weights[name]) for name in weights)
    loaded = load_model(tmp_path / "ours").state_dict()
    mapped = names.to_theirs(names.LLAMA, loaded, tied=False)
    assert all(torch.equal(mapped[name], weights[name].float()) for name in weights)


def test_files_in_the_forms_that_are_published(published, tmp_path):
    """GPT-2's has no prefix and holds its causal masks; others come in shards, or with rope_theta and rope_scaling."""
    transformers = pytest.importorskip("transformers")
    weights = load_file(published / "gpt2" / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    import_folder(rewritten(published / "gpt2", tmp_path / "bare", bare, n_ctx=32), tmp_path / "gpt2")
    model = transformers.AutoModelForCausalLM.from_pretrained(published / "gpt2").eval()
    torch.testing.assert_close(
        load_model(tmp_path / "gpt2")(hub.TOKENS), model(hub.TOKENS).logits, atol=1e-5, rtol=1e-5
    )
    transformers.AutoModelForCausalLM.from_pretrained(published / "llama").save_pretrained(
        tmp_path / "shards", max_shard_size="10KB"
    )
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    old = {"rope_parameters": None, "rope_theta": 700.0, "rope_scaling": {"type": "default"}, "torch_dtype": "float16"}
    config = json.loads((tmp_path / "shards" / "config.json").read_text()) | old
    (tmp_path / "shards" / "config.json").write_text(json.dumps(config))
    assert "model.rotary_base=700.0" in import_folder(tmp_path / "shards", tmp_path / "llama")
    whole = load_file(published / "llama" / "model.safetensors")
    mapped = names.to_theirs(names.LLAMA, load_model(tmp_path / "llama").state_dict(), tied=False)
    assert all(torch.equal(mapped[name], whole[name]) for name in whole)


FULL, LOCAL = "full_attention", "sliding_attention"
CONFIGS = [  # what one line says of a key that ours has no place for
    ("llama", {"model_type": "mistral"}, "model_type=mistral: normexp converts gpt2, llama, gemma2, olmo2 only"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.rope_type=llama3: normexp"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary"),
    ("llama", {"sliding_window": 4096}, "sliding_window=4096: normexp knows no such field of llama"),
    ("llama", {"attention_bias": True}, "attention_bias=true: normexp has false only"),
    ("llama", {"mlp_bias": True}, "mlp_bias=true: normexp has false only"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu: normexp has silu only"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1: normexp has 0.0 only"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}: normexp knows no such field"),
    ("llama", {"hidden_size": None}, "hidden_size: is missing from config.json, for model.width"),
    ("llama", {"intermediate_size": None}, "intermediate_size: is missing from config.json"),
    ("llama", {"vocab_size": None}, "vocab_size=null: must be an integer >= 1"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true: normexp has false only"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings=false: normexp has true only"),
    ("gpt2", {"activation_function": "silu"}, "activation_function=silu: must be one of gelu_new"),
    ("gpt2", {"resid_pdrop": 0.3}, "attn_pdrop=0.0: normexp has one dropout"),
    ("gpt2", {"n_ctx": 64}, "n_ctx=64: is not n_positions=32"),
    ("gemma2", {"layer_types": [FULL, LOCAL, FULL]}, "layer_types=[full_attention,sliding_attention,full_attention]:"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true: normexp has false only"),
    ("llama", {"model_type": ["gpt2"]}, "model_type=[gpt2]: normexp converts"),
    ("llama", {"hidden_size": [24]}, "hidden_size=[24]: must be an integer"),
    ("llama", {"rope_parameters": "default"}, "rope_parameters=default: must be null or an object"),
    ("llama", {"rope_parameters": {"rope_theta": None}}, "rope_parameters.rope_theta=null: must be a finite number"),
    ("llama", {"rope_theta": "abc"}, "rope_theta=abc: must be a finite number > 0"),
    ("llama", {"rms_norm_eps": "x"}, "rms_norm_eps=x: must be a finite number > 0"),
    ("llama", {"tie_word_embeddings": 3}, "tie_word_embeddings=3: must be true or false"),
    ("gpt2", {"activation_function": ["gelu"]}, "activation_function=[gelu]: must be one of"),
    ("gpt2", {"n_inner": "x"}, "n_inner=x: must be an integer >= 1 or null"),
    ("gemma2", {"layer_types": 5}, "layer_types=5: must be a list"),
    ("gemma2", {"layer_types": [LOCAL, FULL]}, "layer_types=[sliding_attention,full_attention]: has 2 layers, not num"),
    ("gemma2", {"query_pre_attn_scalar": -7}, "query_pre_attn_scalar=-7: must be an integer >= 1"),
    ("gemma2", {"attn_logit_softcapping": "x"}, "attn_logit_softcapping=x: must be a finite number > 0 or null"),
    ("olmo2", {"vocab_size": 30}, "model.embed_tokens.weight: has shape (29, 24), not (30, 24), as the config asks"),
    ("olmo2", {"num_hidden_layers": 4}, "model.layers.3.post_attention_layernorm.weight: is missing from the weights"),
    ("olmo2", {"num_hidden_layers": 2}, "model.layers.2.mlp.down_proj.weight: is in the weights, but not in the model"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "line"), CONFIGS)
def test_what_has_no_place_is_refused_by_name(kind, changes, line, published, tmp_path, capsys):
    assert main([str(rewritten(published / kind, tmp_path / "in", **changes)), str(tmp_path / "out")]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"error: {line}")
    assert not (tmp_path / "out").exists()


def test_a_number_may_be_spelt_as_text_or_float(published, tmp_path):
    folder = rewritten(published / "gpt2", tmp_path / "in", n_inner="96", n_embd=24.0, resid_pdrop="0")
    assert import_folder(folder, tmp_path / "out") == import_folder(published / "gpt2", tmp_path / "plain")


def test_layers_that_are_all_alike(published, tmp_path):
    for kinds, expected in (([LOCAL] * 3, "model.local_layers=all"), ([FULL] * 3, "model.window=0")):
        folder = rewritten(published / "gemma2", tmp_path / kinds[0], layer_types=kinds)
        overrides = import_folder(folder, tmp_path / f"{kinds[0]}-out")
        assert expected in overrides


@pytest.mark.parametrize(("overrides", "line"), [
    (["recipe=llama", "norm=ln"], "norm._target_=normexp.norms.LayerNorm: llama, the nearest family, has norm"),
    (["recipe=llama", "model.attn_softcap=50"], "model.attn_softcap=50.0: llama, the nearest family, has 0.0 only"),
    (["recipe=gemma2", "model.query_scale=0.3"], "model.query_scale=0.3: is no 1/√n of an integer n"),
])  # fmt: skip
def test_a_run_of_no_family_is_refused_by_name(overrides, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    loaded = load(*overrides, *tiny.SHORT, "model.heads=2")
    folder = cell.run(loaded, cell.open_source(loaded), None, print, bar=False)
    assert main([str(folder.path), "out"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")
    assert not (tmp_path / "out").exists()


def test_other_mistakes_are_told_in_one_line(published, tmp_path, capsys):
    head = load_file(published / "gpt2" / "model.safetensors") | {"lm_head.weight": torch.ones(29, 24)}
    body = {name: tensor for name, tensor in head.items() if "wte" not in name}
    for name in ("empty", "bin", "index", "broken", "x.safetensors"):
        (tmp_path / name).mkdir()
    for name in ("bin", "index"):
        (tmp_path / name / "config.json").write_bytes((published / "llama" / "config.json").read_bytes())
    (tmp_path / "bin" / "pytorch_model.bin").touch()
    (tmp_path / "index" / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "broken" / "config.json").write_text("{")
    for source, out, line in (
        (tmp_path / "empty", "out", f"{tmp_path / 'empty'}: has neither a config.json nor a config.yaml"),
        (tmp_path / "bin", "out", f"{tmp_path / 'bin'}: weights cannot be read"),
        (tmp_path / "broken", "out", f"{tmp_path / 'broken' / 'config.json'}: cannot be read"),
        (tmp_path / "index", "out", f"{tmp_path / 'index' / 'model.safetensors.index.json'}: weight_map=null: must"),
        (published / "gpt2", "broken/config.json/out", f"{tmp_path / 'broken' / 'config.json' / 'out'}: cannot be"),
        (rewritten(published / "gpt2", tmp_path / "headless", body), "out", "transformer.wte.weight: is missing"),
        (published / "gpt2", "x.safetensors", f"{tmp_path / 'x.safetensors'}: cannot be written (Is a directory)"),
        (rewritten(published / "gpt2", tmp_path / "head", head), "out", "lm_head.weight: differs from the embedding"),
    ):
        assert main([str(source), str(tmp_path / out)]) == 2
        (told,) = capsys.readouterr().err.splitlines()
        assert told.startswith(f"error: {line}")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "checkpoint.pt", "config.json"])
def test_nothing_is_overwritten(name, published, tmp_path, monkeypatch, capsys):
    import_folder(published / "gpt2", tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    monkeypatch.chdir(tmp_path)
    for source in (tmp_path / "run", published / "gpt2"):
        assert main([str(source), "out"]) == 2
        assert capsys.readouterr().err == "error: out: is there already; give another path, or delete it\n"
    assert [path.read_text() for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_folder_is_whole_or_not_there(published, tmp_path, monkeypatch, capsys):
    """And the same command then goes through; an empty folder may stand where it goes."""
    (tmp_path / "empty").mkdir()
    import_folder(published / "gpt2", tmp_path / "run")
    for source, writer in ((tmp_path / "run", (files, "save_file")), (published / "gpt2", (files.checkpoint, "save"))):
        with monkeypatch.context() as patch:
            patch.setattr(*writer, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
            assert main([str(source), str(tmp_path / "out")]) == 2
            assert "out: cannot be written (No space left on device)" in capsys.readouterr().err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "run"]
        assert main([str(source), str(tmp_path / "out")]) == 0
        shutil.rmtree(tmp_path / "out")
    assert export_folder(tmp_path / "run", tmp_path / "empty") == "gpt2"
