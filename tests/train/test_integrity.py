"""Every broken file of a checkpoint is named, and an older checkpoint that is whole is offered."""

import json
import os
import pickle
import shutil
import warnings

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorProperties,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from padded_dispatch.train.integrity import checkpoints, require_whole

RUN = {
    "step": 4,
    "first_loss": 5.5,
    "factors": {"1": "1.25"},
    "reads_above": {"1": 0},
    "settings": {"model": {"top_k": 2}, "recipe": {}, "dispatch": {}, "layout": {}},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Provide a checkpoint that torch has written."""
    folder = tmp_path_factory.mktemp("whole")
    state = {
        "weight": torch.arange(5000, dtype=torch.float32),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "random": {"cpu": torch.get_rng_state(), "seed": 3, "betas": (0.9, 0.95)},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "assuming ... to save in a single process"
        state_dict_saver.save(state, checkpoint_id=folder, no_dist=True)
    (folder / "run.json").write_text(json.dumps(RUN))
    return folder


@pytest.fixture
def run_dir(tmp_path, written):
    """Provide a run's folder with the checkpoints of steps 2, 4 and 6."""
    for step in (2, 4, 6):
        shutil.copytree(written, tmp_path / "checkpoints" / f"step-{step:08d}")
    return tmp_path


def data_file(checkpoint):
    (path,) = checkpoint.glob("*.distcp")
    return path


def cut(path, num_bytes):
    os.truncate(path, num_bytes)


def rewrite(checkpoint, **changes):
    """Write `.metadata` again with other values."""
    path = checkpoint / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for name, value in changes.items():
        setattr(metadata, name, value)
    path.write_bytes(pickle.dumps(metadata))


class Code:
    """An object whose pickle runs code."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


FAULTS = {
    "run.json is missing": lambda c: (c / "run.json").unlink(),
    r"run.json cannot be read \(Unterminated .*\)": lambda c: cut(c / "run.json", 20),
    r"run.json cannot be read \(Expecting value.*\)": lambda c: cut(c / "run.json", 0),
    "run.json does not hold step, .* and settings": lambda c: (c / "run.json").write_text("[1]"),
    ".metadata is missing": lambda c: (c / ".metadata").unlink(),
    r".metadata cannot be read \(EOFError: .*\)": lambda c: cut(c / ".metadata", 0),
    r".metadata cannot be read \(UnpicklingError: .*\)": lambda c: cut(c / ".metadata", 100),
    ".metadata holds dict, not Metadata": lambda c: (c / ".metadata").write_bytes(pickle.dumps({})),
    ".metadata names no data": lambda c: rewrite(c, storage_data={}),
    r"__0_0.distcp is missing": lambda c: data_file(c).unlink(),
    r"__0_0.distcp is cut off after 0 of \d+ bytes": lambda c: cut(data_file(c), 0),
    r"__0_0.distcp is cut off after 9999 of \d+ bytes": lambda c: cut(data_file(c), 9999),
}


def test_a_whole_checkpoint_gives_what_run_json_holds(run_dir):
    found = checkpoints(run_dir)
    assert [path.name for path in found] == ["step-00000002", "step-00000004", "step-00000006"]
    assert require_whole(found[-1]) == RUN


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_file_is_named_and_an_older_checkpoint_offered(run_dir, fault):
    *_, older, newest = checkpoints(run_dir)
    FAULTS[fault](newest)
    message = (
        rf"^--resume must have a whole checkpoint, got '{newest}: {fault}'; delete step-00000006 "
        "to continue from step-00000004, which is whole$"
    )
    with pytest.raises(ValueError, match=message):
        require_whole(newest)
    assert require_whole(older) == RUN


def test_the_last_byte_counts(run_dir):
    newest = checkpoints(run_dir)[-1]
    size = data_file(newest).stat().st_size
    cut(data_file(newest), size - 1)
    with pytest.raises(ValueError, match=f"is cut off after {size - 1} of {size} bytes"):
        require_whole(newest)


def test_only_a_checkpoint_that_is_whole_is_offered(run_dir):
    oldest, middle, newest = checkpoints(run_dir)
    data_file(newest).unlink()
    (middle / "run.json").unlink()
    with pytest.raises(
        ValueError, match="delete step-00000004 and step-00000006 to continue from step-00000002"
    ):
        require_whole(newest)
    (oldest / ".metadata").unlink()
    with pytest.raises(ValueError, match="; no older checkpoint is whole: start again in another"):
        require_whole(newest)


def test_a_checkpoint_that_was_moved_aside_does_not_count(run_dir):
    newest = checkpoints(run_dir)[-1]
    newest.rename(newest.with_name(f"{newest.name}.broken"))
    assert checkpoints(run_dir)[-1].name == "step-00000004"


def test_code_in_metadata_is_not_run(run_dir, tmp_path):
    newest, made = checkpoints(run_dir)[-1], tmp_path / "made"
    (newest / ".metadata").write_bytes(pickle.dumps(Code(made)))
    with pytest.raises(ValueError, match=r"\.metadata asks for posix\.mkdir, which no checkpoint"):
        require_whole(newest)
    assert not made.exists()
    pickle.loads((newest / ".metadata").read_bytes())
    assert made.exists()  # It would have run.


@pytest.mark.parametrize("name", ["eval", "load", "ops", "hub.load"])
def test_no_function_of_torch_is_found(run_dir, name):
    newest = checkpoints(run_dir)[-1]
    (newest / ".metadata").write_bytes(b"\x80\x04\x8c\x05torch\x8c" + bytes([len(name)]))
    with (newest / ".metadata").open("ab") as file:
        file.write(name.encode() + b"\x93.")
    with pytest.raises(ValueError, match=rf"\.metadata asks for torch\.{name}, which"):
        require_whole(newest)


def test_data_outside_of_the_folder_is_refused(run_dir, written):
    newest = checkpoints(run_dir)[-1]
    metadata = pickle.loads((newest / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../{written.name}"
    rewrite(newest, storage_data=metadata.storage_data)
    with pytest.raises(ValueError, match=r"names \.\./.*, which lies outside of the folder"):
        require_whole(newest)


def test_the_plans_that_megatron_keeps_are_read(run_dir):
    newest = checkpoints(run_dir)[-1]
    metadata = pickle.loads((newest / ".metadata").read_bytes())
    assert isinstance(metadata, Metadata)
    (chunk,) = metadata.state_dict_metadata["weight"].chunks
    properties = TensorProperties.create_from_tensor(torch.ones(1))
    data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size([5000]))
    index = MetadataIndex("weight", torch.Size([0]), 0)
    item = WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)
    rewrite(newest, all_local_plans=[SavePlan([item])])
    assert require_whole(newest) == RUN
