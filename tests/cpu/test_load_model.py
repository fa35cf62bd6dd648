"""load_model against from_pretrained: every tensor of every family, ties, dtypes, configuration overrides."""

from __future__ import annotations

import copy
import shutil
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import headrace
import tiny_checkpoints as tiny
from against_plain import assert_close, batch, hf_loss, sgd, weights
from headrace.base.errors import ModelError, StepError
from headrace.checkpoint.export import save_pretrained
from headrace.model.build import load_model
from headrace.model.parked import Parked

EXACT = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_tensor_equals_from_pretrained(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Parameters and buffers have the bits and dtypes of an ordinary load, from one file or many."""
    folder = tiny.save(tiny.build(family, dtype), tmp_path, "10KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    model, expected = load_model(folder), tiny.reference(folder, family)
    assert type(model) is type(expected)
    assert all(isinstance(parameter, Parked) for parameter in model.parameters())
    tiny.assert_same_values(model, expected)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in expected.parameters()]
    assert model.training is expected.training is False
    assert model.name_or_path == str(folder)


@pytest.mark.parametrize("family", ["llama-tied", "gemma2", "mixtral"])
def test_another_dtype_equals_from_pretrained(family: str, tmp_path: Path) -> None:
    """Rotary tables stay float32 in a bfloat16 model; float32 files are rounded, bfloat16 files widened."""
    wide = tiny.save(tiny.build(family), tmp_path / "wide")
    narrow = tiny.save(tiny.build(family, torch.bfloat16), tmp_path / "narrow")
    tiny.assert_same_values(load_model(wide, "bfloat16"), tiny.reference(wide, family, dtype=torch.bfloat16))
    tiny.assert_same_values(load_model(narrow, torch.float32), tiny.reference(narrow, family, dtype=torch.float32))


def test_a_source_rounds_through_the_dtype_of_the_model(tmp_path: Path) -> None:
    """Asking a bfloat16 model of float32 files for a float32 value gives the rounded one, as an ordinary load does."""
    folder = tiny.save(tiny.build("mixtral"), tmp_path)
    model = load_model(folder, torch.bfloat16)
    expected = tiny.reference(folder, "mixtral", dtype=torch.bfloat16)
    for name, parameter in expected.named_parameters():
        out = torch.empty(parameter.shape, dtype=torch.float32)
        model._headrace_source.read_into(name, out)
        assert torch.equal(out, parameter.detach().float())


def test_a_source_fills_strided_views(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("mixtral"), tmp_path)
    source = load_model(folder)._headrace_source
    name = "model.layers.1.mlp.experts.gate_up_proj"
    expected = dict(tiny.reference(folder, "mixtral").named_parameters())[name].detach()
    store = torch.full((*expected.shape[:-1], 2 * expected.shape[-1] + 3), 7.0)
    source.read_into(name, store[..., 1 : 2 * expected.shape[-1] : 2])
    assert torch.equal(store[..., 1 : 2 * expected.shape[-1] : 2], expected)
    assert (store[..., ::2] == 7).all() and (store[..., -2:] == 7).all()


def test_tied_names_are_one_parameter_and_both_can_be_read(tmp_path: Path) -> None:
    model = load_model(tiny.save(tiny.build("llama-tied"), tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    values = [torch.empty(99, 32), torch.empty(99, 32)]
    for name, out in zip(["lm_head.weight", "model.embed_tokens.weight"], values, strict=True):
        model._headrace_source.read_into(name, out)
    assert torch.equal(*values)


@pytest.mark.parametrize("equal", [True, False])
def test_a_tie_that_the_files_contradict(equal: bool, tmp_path: Path) -> None:
    """Both ends stored: tied when they are equal, left apart (and said) when they differ."""
    folder = tiny.save(tiny.build("llama", tie_word_embeddings=False), tmp_path)
    tensors = tiny.stored(folder)
    if equal:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tiny.rewrite(folder, tensors, tie_word_embeddings=True)
    model = load_model(folder)
    tiny.assert_same_values(model, tiny.reference(folder, "llama"))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is equal
    assert any("not tied" in str(event) for event in model._headrace_source.events) is not equal


def test_a_tied_head_stored_without_the_embedding(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama-tied"), tmp_path)
    tensors = tiny.stored(folder)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    tiny.rewrite(folder, tensors)
    tiny.assert_same_values(load_model(folder), tiny.reference(folder, "llama"))


def test_a_base_model_checkpoint_gets_a_new_head(tmp_path: Path) -> None:
    """Files of LlamaModel into LlamaForCausalLM: the prefix is added, the head is initialised, an event names it."""
    folder = tiny.save(tiny.build("llama").model, tmp_path)
    model, expected = load_model(folder), tiny.reference(folder, "llama")
    for name, parameter in expected.model.named_parameters():
        assert torch.equal(model.model.get_parameter(name).detach(), parameter.detach())
    head = model.lm_head.weight.detach()
    assert 0.015 < float(head.std()) < 0.025 and torch.equal(head, model.lm_head.weight.detach())
    assert [str(event) for event in model._headrace_source.events if "lm_head.weight" in str(event)]


def test_a_missing_weight_is_initialised_and_named(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama"), tmp_path)
    tensors = tiny.stored(folder)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tiny.rewrite(folder, tensors)
    model = load_model(folder)
    assert torch.equal(model.model.norm.weight.detach(), torch.ones(32))
    assert 0.015 < float(model.model.layers[1].mlp.up_proj.weight.detach().std()) < 0.025
    texts = [str(event) for event in model._headrace_source.events]
    assert any("model.layers.1.mlp.up_proj.weight, model.norm.weight" in text for text in texts)


def test_an_unknown_tensor_is_reported(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama"), tmp_path)
    rotary = "model.layers.0.self_attn.rotary_emb.inv_freq"  # older checkpoints stored this table
    tiny.rewrite(folder, {**tiny.stored(folder), "visual.patch.weight": torch.ones(2), rotary: torch.ones(4)})
    texts = " ".join(str(event) for event in load_model(folder)._headrace_source.events)
    assert "visual.patch.weight" in texts and "inv_freq" not in texts


def test_persistent_buffers_are_read(tmp_path: Path) -> None:
    """A router's correction bias is a buffer of the checkpoint: read for real, in its own dtype."""
    import transformers

    small = {key: value for key, value in tiny.FAMILIES["llama"][1].items() if key != "num_key_value_heads"}
    experts = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    experts["first_k_dense_replace"] = 1
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    config = transformers.DeepseekV3Config(**small, **experts, **ranks, moe_intermediate_size=24, num_key_value_heads=4)
    built = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    built.model.layers[1].mlp.gate.e_score_correction_bias.normal_()
    folder = tiny.save(built, tmp_path)
    model, expected = load_model(folder), tiny.reference(folder, "deepseek")
    tiny.assert_same_values(model, expected)
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.abs().sum() > 0


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_weights_may_be_changed_before_wrap(family: str, tmp_path: Path) -> None:
    """What is changed comes to memory, in its new shape; the rest stays in its files, and all of it trains."""
    folder = tiny.save(tiny.build(family), tmp_path)
    both = load_model(folder), tiny.reference(folder, family)
    for model in both:
        model.resize_token_embeddings(101)
        layer, alias = model.model.layers[0], model.model.layers[1].mlp.up_proj.weight.data
        with torch.no_grad():
            layer.self_attn.q_proj.weight[3].mul_(2)
            model.model.norm.weight.add_(0.1)
        layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data.flip(0)
        alias[0] = 0.1
        alias.view(torch.int32)[1] = 0
        alias[2].add_(0.3)
        model.load_state_dict({"model.layers.1.mlp.down_proj.weight": layer.mlp.down_proj.weight * 2}, strict=False)
        model.to("cpu").float()
    ours, plain = both
    changed = {name for name, p in ours.named_parameters() if not isinstance(p, Parked)}
    assert changed == {
        "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight",
    } | ({"lm_head.weight"} if family == "llama" else set())  # fmt: skip
    new = [ours.get_input_embeddings().weight.data[-2:], plain.get_input_embeddings().weight.data[-2:]]
    new[1].copy_(new[0])  # drawn at random
    if family == "llama":
        plain.lm_head.weight.data[-2:] = ours.lm_head.weight.data[-2:]
    tiny.assert_same_values(ours, plain)
    with pytest.raises(ModelError, match=r"bfloat16 on cpu.* Give dtype= to headrace\.load_model"):
        ours.model.layers[1].self_attn.to(torch.bfloat16)
    optimizer = sgd(plain)
    ours, driver = headrace.wrap(ours, sgd(ours), placement={"weights": "host", "state": "host"}, device="cpu")
    with headrace.session(ours):
        for step in range(2):
            for model, each in ((ours, driver), (plain, optimizer)):
                hf_loss(model, batch(seed=step, vocabulary=101)).backward()
                each.step()
                each.zero_grad()
        assert_close(weights(ours), weights(plain))


def test_training_a_model_that_was_not_wrapped_says_so(tmp_path: Path) -> None:
    model = load_model(tiny.save(tiny.build("llama"), tmp_path))
    with pytest.raises(StepError, match=r"the model is not wrapped.* Call headrace\.wrap"):
        hf_loss(model, batch(vocabulary=99)).backward()


def test_reading_from_several_threads(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("mixtral", torch.bfloat16), tmp_path)
    model, expected = load_model(folder), dict(tiny.reference(folder, "mixtral").named_parameters())
    wrong: list[str] = []

    def read_all() -> None:
        for name, parameter in expected.items():
            out = torch.empty(parameter.shape, dtype=parameter.dtype)
            model._headrace_source.read_into(name, out)
            if not torch.equal(out, parameter.detach()):
                wrong.append(name)

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_copy_of_a_loaded_model_holds_its_weights(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama-tied"), tmp_path)
    twin = copy.deepcopy(load_model(folder))
    assert not any(isinstance(parameter, Parked) for parameter in twin.parameters())
    tiny.assert_same_values(twin, tiny.reference(folder, "llama"))


def test_overrides_reach_the_configuration(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("qwen3"), tmp_path)
    model = load_model(folder, num_hidden_layers=1, attn_implementation="eager", use_cache=False)
    assert len(model.model.layers) == 1 and len(model.config.layer_types) == 1
    assert model.config._attn_implementation == "eager" and model.config.use_cache is False
    assert any("model.layers.1." in str(event) for event in model._headrace_source.events)


def test_generation_settings_are_loaded(tmp_path: Path) -> None:
    built = tiny.build("llama")
    built.generation_config.max_new_tokens = 17
    folder = tiny.save(built, tmp_path)
    assert load_model(folder).generation_config.max_new_tokens == 17


def test_files_are_only_read(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("mixtral"), tmp_path)
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    for parameter in load_model(folder).parameters():
        parameter.detach()
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()} == before


def test_a_model_in_the_hub_cache_loads_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache keeps files as links into a folder of blobs."""
    import huggingface_hub

    folder = tiny.save(tiny.build("llama"), tmp_path / "plain")
    root = tmp_path / "hub" / "models--somebody--tiny"
    snapshot = root / "snapshots" / "0123abcd"
    for place in (snapshot, root / "blobs", root / "refs"):
        place.mkdir(parents=True)
    (root / "refs" / "main").write_text("0123abcd")
    for path in folder.iterdir():
        shutil.copy(path, root / "blobs" / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = load_model("somebody/tiny")
    tiny.assert_same_values(model, tiny.reference(folder, "llama"))
    assert model.name_or_path == "somebody/tiny"


def test_attributes_of_parameters_survive(tmp_path: Path) -> None:
    """Parameters are replaced once, while the model is built: later identity holds."""
    model = load_model(tiny.save(tiny.build("llama"), tmp_path))
    first = list(model.parameters())
    for parameter in model.parameters():
        parameter.detach()
    assert all(a is b for a, b in zip(first, model.parameters(), strict=True))
    assert all(isinstance(parameter, nn.Parameter) and not parameter.is_meta for parameter in first)


def test_code_beside_the_weights_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with its own modelling file, shared blocks and a tensor under two names; saved with its code."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "modeling_twice.py").write_text(
        "import torch\n"
        "from transformers import PreTrainedConfig, PreTrainedModel\n"
        "class TwiceConfig(PreTrainedConfig):\n"
        "    model_type = 'headrace-twice'\n"
        "    def __init__(self, width=6, **rest):\n"
        "        self.width = width\n"
        "        super().__init__(**rest)\n"
        "class TwiceModel(PreTrainedModel):\n"
        "    config_class = TwiceConfig\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.first = torch.nn.Linear(config.width, config.width)\n"
        "        self.second = self.first\n"
        "        self.register_buffer('table', torch.arange(4.0) ** 2, persistent=False)\n"
        "        self.post_init()\n"
        "    def forward(self, x):\n"
        "        return self.second(self.first(x))\n"
    )
    (folder / "config.json").write_text(
        '{"model_type": "headrace-twice", "width": 6, "architectures": ["TwiceModel"], "dtype": "float32", "auto_map": '
        '{"AutoConfig": "modeling_twice.TwiceConfig", "AutoModelForCausalLM": "modeling_twice.TwiceModel"}}'
    )
    weight, bias = torch.randn(6, 6), torch.randn(6)
    tiny.rewrite(folder, {"first.weight": weight, "first.bias": bias})
    with pytest.raises(ModelError, match="trust_remote_code"):
        load_model(folder)
    model = load_model(folder, trust_remote_code=True)
    assert type(model).__name__ == "TwiceModel" and model.first is model.second
    assert torch.equal(model.second.weight.detach(), weight) and model.table.tolist() == [0, 1, 4, 9]
    save_pretrained(model, tmp_path / "saved", lambda name: model.get_parameter(name).detach())
    again = load_model(tmp_path / "saved", trust_remote_code=True)
    tiny.assert_same_values(again, model)
