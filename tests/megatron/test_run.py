"""The launcher installs, then runs the script as if it had been started directly."""

from pathlib import Path

import pytest

from padded_dispatch.megatron.options import PaddedOptions
from padded_dispatch.megatron.run import main, read
from tests.support.processes import python

SCRIPT = """
import sys
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.training import train_step
import beside

config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=2,
    moe_router_topk=2, moe_aux_loss_coeff=0.0, moe_token_dispatcher_type="padded_alltoall")
followed = hasattr(train_step, "__wrapped__")
print(__name__, sys.argv[1:], config.padded_dispatch.eval_factor, beside.VALUE, followed)
"""


def test_script_runs_as_main_with_its_own_arguments(tmp_path: Path):
    """Megatron-LM's loop, which lies beside it, is followed."""
    folder = tmp_path / "megatron" / "training"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "training.py").write_text("train_step = training_log = lambda: None")
    (tmp_path / "beside.py").write_text("VALUE = 7")
    (tmp_path / "pretrain_gpt.py").write_text(SCRIPT)
    words = "--padded-eval-factor", "16", str(tmp_path / "pretrain_gpt.py"), "--lr", "3", "-x"
    printed = python("-m", "padded_dispatch.megatron.run", *words)
    assert printed.splitlines()[-1] == "__main__ ['--lr', '3', '-x'] 16.0 7 True"


def test_missing_script_is_named(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run", "nowhere.py"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "SCRIPT must be an existing file, got 'nowhere.py'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "--padded-eval-factor 16 --padded-experts=packed s.py --lr -3 -x --no-pad a -- b",
        "s.py --lr -3 -x --no-pad a --padded-experts packed --padded-eval-factor=16 -- b",
        "--padded-eval-factor 16 s.py --lr -3 -x --padded-experts=packed --no-pad a -- b",
        "s.py --lr --padded-eval-factor 16 -3 --padded-experts packed -x --no-pad a -- b",
    ],
)
def test_our_options_stand_anywhere_and_the_rest_keeps_its_order(line):
    options, script, arguments = read(line.split())
    assert options == PaddedOptions(eval_factor=16.0, experts="packed")
    assert (script, arguments) == ("s.py", ["--lr", "-3", "-x", "--no-pad", "a", "--", "b"])


def test_words_of_the_script_are_no_abbreviations_of_ours():
    for name in ("--padded", "--padded-vocab-size"):  # The second is Megatron-LM's.
        assert read(["s.py", name, "3", "--help"])[2] == [name, "3", "--help"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "SCRIPT must be given, for example pretrain_gpt.py"),
        ("--lr 3 s.py", "SCRIPT must stand before its own arguments, got '--lr' first"),
        ("s.py --padded-polcy probs", "--padded-polcy must be an option of the padded dispatcher"),
        ("s.py --padded-exprts=packed", "any '--'; did you mean --padded-experts?"),
        ("s.py -- --padded-experts packed", "stand before any '--'; move it there"),
        ("s.py --padded-experts none", "argument --padded-experts: invalid choice: 'none'"),
        ("s.py --padded-overflow-threshold 2", "--padded-overflow-threshold must be a share"),
    ],
)
def test_a_mistake_is_named(capsys, line, message):
    with pytest.raises(SystemExit) as end:
        read(line.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err
