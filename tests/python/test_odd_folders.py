# SPDX-License-Identifier: Apache-2.0
"""Output folders that are full, removed, oddly named, or whose clocks lie."""

import contextlib
import os
import shutil
import subprocess
import time

import peer
import pytest
from conftest import BUILD
from lost_runs import refused, root, train, weights, whole  # noqa: F401  (root and whole are fixtures)

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def disk(folder, size):
    """A file system of `size` bytes."""
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system may be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_ends_the_run_and_leaves_what_was_saved(root, whole, tmp_path):
    need = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file()) + (256 << 10)  # whole pages for each file
    ended = set()
    for part in range(0, 12):
        size = 4096 + need * part // 10
        with disk(tmp_path / "disk", size):
            out = tmp_path / "disk" / "out"
            result = peer.run_cli(*train(root, out), check=False)
            ended.add(result.returncode)
            assert result.returncode == 0 or os.strerror(28) in result.stderr, (size, result.stderr)
            said = [line.split()[-1] for line in result.stdout.splitlines() if line.startswith("saved ")]
            # 2 says that nothing was done, 4 that the run can go on
            assert result.returncode != 2 or not said, result.stderr
            assert (result.returncode == 4) == bool(said and result.returncode), (said, result.stderr)
            for checkpoint in said:  # older ones are removed by no failing save
                assert peer.run_cli("inspect", checkpoint).returncode == 0
            subprocess.run(["mount", "-o", f"remount,size={64 << 20}", tmp_path / "disk"], check=True)
            peer.run_cli(*train(root, out, overwrite_output_dir="true", resume_from_checkpoint="true" if said else "false"))
            assert weights(out) == weights(whole)
            assert not [name for name in os.listdir(out) if name.startswith(".")]
    assert {0, 2, 4} <= ended


def test_a_folder_that_is_removed_in_the_middle_is_an_error(root, tmp_path):
    out = tmp_path / "out"
    words = [BUILD / "qlorapp", *train(root, out, max_steps=100000, num_train_epochs=9999, save_steps=1)]
    with subprocess.Popen(
        list(map(str, words)), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while "saved " not in process.stdout.readline():
            pass
        while out.exists():
            shutil.rmtree(out, ignore_errors=True)
        _, errors = process.communicate(timeout=60)
    assert process.returncode in (1, 2) and str(out) in errors and "No such file" in errors


@pytest.mark.parametrize("name", ["n" * 255, "trainé ✓ 日本", " a space", "a\nline"])
def test_a_folder_of_any_name_is_written_and_resumed(root, whole, tmp_path, name):
    out = tmp_path / name
    resumed = train(root, out, resume_from_checkpoint=out / "checkpoint-2")
    for words in (train(root, out), resumed, ["inspect", out / "checkpoint-6"]):
        done = subprocess.run([BUILD / "qlorapp", *map(str, words)], env=ENVIRONMENT, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    assert weights(out) == weights(whole)


def test_a_name_that_is_no_text_is_refused_at_the_start(root, tmp_path):
    out = tmp_path / b"\xff\xfe".decode(errors="surrogateescape")  # trainer_state.json and training_args.json name it
    assert r"output_dir must be UTF-8; got '" in refused(*train(root, out)) and not out.exists()


@pytest.mark.parametrize("skew", [-10 * 365 * 86400, 10 * 365 * 86400])
def test_checkpoints_are_ordered_by_step_whatever_the_clock_said(root, whole, tmp_path, skew):
    out = tmp_path / "out"
    peer.run_cli(*train(root, out, save_total_limit=3))
    for number, path in enumerate(sorted(out.rglob("*"), reverse=True)):  # older steps look newer
        os.utime(path, (time.time() + skew + number, time.time() + skew + number))
    shutil.rmtree(out / "checkpoint-6")
    result = peer.run_cli(*train(root, out, save_total_limit=1, resume_from_checkpoint="true"))
    assert f"from {out}/checkpoint-4" in result.stdout
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-6"]
    assert weights(out) == weights(whole)
