"""Mapping, slicing and writing safetensors files, against the safetensors library."""

import os
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from treeattn import ArgumentError, files


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "uint8"])
def test_mapped_tensors_equal_the_librarys(tmp_path, dtype):
    array = (np.arange(2 * 7 * 3 * 4).reshape(2, 7, 3, 4) % 11).astype(getattr(ml_dtypes, dtype, dtype))
    path = tmp_path / "a.safetensors"
    save_file({"a": array, "empty": np.zeros((1, 0, 2), np.float32)}, path, metadata={"scale": "0.5"})
    mapped = files.open_cache(path)
    library = load_file(path)
    for name, tensor in library.items():
        np.testing.assert_array_equal(mapped[name], tensor)
        assert mapped[name].dtype == tensor.dtype
    assert mapped.scale() == 0.5
    assert not mapped["a"].flags.writeable


def test_runs_are_copied_in_blocks_and_nothing_else(tmp_path):
    array = np.arange(3 * 50 * 2 * 8, dtype=np.float32).reshape(3, 50, 2, 8)
    path = tmp_path / "a.safetensors"
    save_file({"a": array}, path)
    told = []
    runs = (slice(1, 5), slice(10, 50, 7))
    shard = files.load_runs(files.open_cache(path)["a"], runs, told.append, block=3)
    np.testing.assert_array_equal(shard, np.concatenate([array[:, run] for run in runs], axis=1))
    assert sum(told) == shard.nbytes
    assert len(told) > 2


def test_missing_tensor_lists_what_is_there(tmp_path):
    save_file({"query": np.zeros(2, np.float32)}, tmp_path / "a.safetensors")
    with pytest.raises(ArgumentError, match="no tensor 'q'.*holds query"):
        files.open_cache(tmp_path / "a.safetensors")["q"]


def test_output_is_whole_or_absent(tmp_path, monkeypatch):
    target, ordinary = tmp_path / "result", tmp_path / "ordinary"
    ordinary.touch()
    mode = ordinary.stat().st_mode
    ordinary.unlink()
    write = files.output_writer(target)
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(b"cont")
    assert list(tmp_path.iterdir()) == []  # interrupted half way
    write(b"content")
    assert target.read_bytes() == b"content"
    assert list(tmp_path.iterdir()) == [target]
    assert target.stat().st_mode == mode


def test_what_is_half_written_is_its_users_alone_under_a_name_that_changes(tmp_path, monkeypatch):
    names = set()

    def looked_at(_):
        (half,) = set(tmp_path.iterdir()) - {tmp_path / "result"}
        assert half.stat().st_mode & 0o777 == 0o600
        names.add(half.name)

    monkeypatch.setattr(files.os, "fsync", looked_at)
    for _ in range(2):
        files.output_writer(tmp_path / "result")(b"content")
    assert len(names) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's link")
def test_another_users_link_in_a_shared_folder_is_not_followed(tmp_path):
    (tmp_path / "private").write_text("precious")
    shared, link = tmp_path / "shared", tmp_path / "shared" / "result"
    shared.mkdir()
    shared.chmod(0o1777)
    link.symlink_to(tmp_path / "private")
    os.chown(link, 12345, 12345, follow_symlinks=False)
    os.chown(shared, 4711, 4711)
    with pytest.raises(ArgumentError, match="another user's link"):
        files.output_writer(link)
    os.chown(link, 0, 0, follow_symlinks=False)
    files.output_writer(link)(b"mine")
    assert (tmp_path / "private").read_bytes() == b"mine"
