"""The launcher installs, then runs the script as if it had been started directly."""

import subprocess
import sys
from pathlib import Path

import pytest

from padded_dispatch.megatron.run import main
from tests.support.ahead import ENVIRONMENT

SCRIPT = """
import sys
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
import beside

config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=2,
    moe_router_topk=2, moe_aux_loss_coeff=0.0, moe_token_dispatcher_type="padded_alltoall")
print(__name__, sys.argv[1:], config.padded_dispatch.alignment, beside.VALUE)
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "padded_dispatch.megatron.run", *words]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


@pytest.mark.ahead
def test_script_runs_as_main_with_its_own_arguments(tmp_path: Path):
    (tmp_path / "beside.py").write_text("VALUE = 7")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run("--padded-alignment", "16", str(tmp_path / "script.py"), "--lr", "3", "-x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "__main__ ['--lr', '3', '-x'] 16 7"


@pytest.mark.ahead
@pytest.mark.parametrize("on_overflow", ["retry", "drop"])
def test_megatron_lms_loop_beside_the_script_is_followed(tmp_path: Path, on_overflow):
    folder = tmp_path / "megatron" / "training"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "training.py").write_text("def train_step(model, forward_backward_func): pass")
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(
        "from megatron.training.training import train_step\n"
        "print(hasattr(train_step, '__wrapped__'))"
    )
    done = run("--padded-on-overflow", on_overflow, str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True"


@pytest.mark.ahead
def test_a_script_without_megatron_lm_runs_with_retry_too(tmp_path: Path):
    (tmp_path / "beside.py").write_text("VALUE = 7")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run("--padded-on-overflow", "retry", str(tmp_path / "script.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "__main__ [] auto 7"


def test_missing_script_is_named(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run", "nowhere.py"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "script must be an existing file, got 'nowhere.py'" in capsys.readouterr().err


def test_a_wrong_option_is_named_by_its_flag(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run", "--padded-grow-after", "0", __file__])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "error: --padded-grow-after must" in error and "got 0" in error
