"""What tpu/launch sends to the workers: the working tree, without what looks like a secret.

Over the stand-ins of tests/launch_bed.py.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from launch_bed import ROOT, Bed, git, one_worker, write_files

from errors import InputError
from tpu.launch import hosts, request, worker, workers


def names_in(content: bytes) -> list[str]:
    """Returns the names of the files in a bundle."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return archive.getnames()


# ---- the bundle --------------------------------------------------------------------------------


@pytest.fixture
def project(bed) -> Path:
    """A project with a new file, an ignored one, a removed one, a program and a link."""
    project = bed.project
    write_files({project / name: "text" for name in ("new file's.py", "a.tmp", "tool")})
    (project / "link").symlink_to("train.py")
    (project / "tool").chmod(0o700)
    git(project, "add", "tool")
    (project / "message").unlink()
    return project


def test_the_bundle_has_what_git_knows_or_does_not_ignore(project):
    bundle = request.make_bundle(project)

    with tarfile.open(fileobj=io.BytesIO(bundle.content)) as archive:
        members = {member.name: member for member in archive.getmembers()}
    assert sorted(members) == [
        ".gitignore",
        "Makefile",
        "exit_code.sh",
        "link",
        "new file's.py",
        "tool",
        "train.py",
    ]
    assert bundle.files == 7
    assert members["tool"].mode == 0o755
    assert members["train.py"].mode == 0o644
    assert members["link"].issym()
    assert members["link"].linkname == "train.py"


def test_a_bundle_is_named_by_its_content(project):
    bundle = request.make_bundle(project)

    os.utime(project / "train.py", (1, 1))
    assert request.make_bundle(project) == bundle

    (project / "train.py").write_text("other")
    assert request.make_bundle(project).name != bundle.name


def assert_refused(folder: Path, message: str) -> None:
    with pytest.raises(InputError, match=message):
        request.make_bundle(folder)


def test_a_folder_without_a_makefile_is_refused(tmp_path):
    assert_refused(tmp_path, "has no Makefile")


def test_a_folder_without_git_is_refused(tmp_path):
    (tmp_path / "Makefile").touch()
    assert_refused(tmp_path, "git cannot list the files")


def test_a_repository_within_the_tree_is_refused(bed):
    git(bed.project, "init", "-q", "inner")
    write_files({bed.project / "inner/file": ""})
    assert_refused(bed.project, "inner/ is neither a file nor a link")


def test_a_tree_that_is_too_large_is_refused(bed, monkeypatch):
    monkeypatch.setattr(request, "BUNDLE_MEGABYTES", 2)
    write_files({bed.project / "out/deep/weights": "x" * (3 << 20)})
    assert_refused(bed.project, r"has 3 MB, more than 2 MB: 3 MB in out/, .*\.gitignore")


@pytest.mark.parametrize("how", ["unreadable", "shrinks", "removed"])
def test_a_file_that_cannot_be_packed_is_one_sentence(how, bed, here, monkeypatch):
    real_open = open
    message = os.path.join(os.fsencode(bed.project), b"message")

    def opened(path: object, *rest: object, **more: object) -> object:
        if path == message:
            if how == "unreadable":
                raise PermissionError(13, "Permission denied", "message")
            if how == "removed":
                os.unlink(message)
            else:
                os.truncate(message, 1)
        return real_open(path, *rest, **more)

    monkeypatch.setattr(request, "open", opened, raising=False)
    code, _, err = here("train")
    assert code == 2, err
    assert "error: message cannot be read: " in err, err
    assert "Traceback" not in err, err
    assert ".gitignore" in err


# ---- names -------------------------------------------------------------------------------------


def test_names_do_not_depend_on_the_clients_locale(bed):
    name = "größe 木.py"
    (bed.project / name).write_text("x = 1")
    program = (
        "import sys; from pathlib import Path; from tpu.launch import request;"
        " sys.stdout.buffer.write(request.make_bundle(Path(sys.argv[1])).content)"
    )
    ascii_only = {
        "PATH": os.environ["PATH"],
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }

    command = [sys.executable, "-c", program, str(bed.project)]
    result = subprocess.run(command, cwd=ROOT, env=ascii_only, capture_output=True)
    assert result.returncode == 0, result.stderr
    assert name in names_in(result.stdout)

    worker.unpack(result.stdout, bed.folder / "tree", bed.folder / "manifest.json")
    assert (bed.folder / "tree" / name).read_text() == "x = 1"


@one_worker
def test_odd_names_and_many_files_arrive(bed):
    odd = ["-rf", "--help.py", "a\nb.py", "tab\tand space", "deep/" * 30 + "x", "x" * 200]
    write_files({bed.project / name: "x = 1" for name in odd})
    os.link(bed.project / "message", bed.project / "second")
    write_files({bed.project / f"many-{number}": str(number) for number in range(500)})

    code, _, err = bed.run("train", "--run", "one")
    assert code == 0, err

    tree = bed.zoo(0) / "tree"
    for name in odd:
        assert (tree / name).read_text() == "x = 1", name
    assert (tree / "second").read_text() == "it broke"
    assert (tree / "many-499").read_text() == "499"


# ---- the copy on a worker ----------------------------------------------------------------------


def train_one(bed: Bed, args: str, results: str, copies: int) -> str:
    """Runs a training to its end. Returns standard output.

    args: the trainer's
    results: what is said of the place of its results, which one worker need not share
    copies: how often the bundle is sent for it
    """
    before = len(bed.calls("ssh", " receive "))
    code, out, err = bed.run("train", "--run", "one", "--", "MODEL=tiny", f"ARGS={args}")
    assert code == 0, err
    assert results in err, err
    assert len(bed.calls("ssh", " receive ")) - before == copies
    assert out.count("start one at") == 1
    return out


@one_worker
def test_a_tree_is_copied_once(bed):
    # gcloud repeats both with the rest of the input.
    bed.wrong(match=" status ", input=workers.PROGRAM.index(b"\ndef main"))
    bed.wrong(match=" receive ", input=len(workers.PROGRAM) + 99)
    fetch = "scp --recurse my-tpu:xla-zoo/my-tpu/worker-0/tree/runs/one runs/ --worker=0"
    out = train_one(bed, "", fetch, copies=2)
    assert out == "start one at 0 with '' and None\nstep 1\nstep 2\nstep 3\nend\n"

    train_one(bed, "--runs=mine", "my-tpu:xla-zoo/my-tpu/worker-0/tree/mine/one runs/", copies=0)


@one_worker
def test_a_changed_tree_replaces_only_what_differs(bed):
    project = bed.project
    tree = bed.zoo(0) / "tree"
    names = ("old/deep/file.py", "kept/a.py", "kept/b.py", "turns/file.py", "plain")
    write_files({project / name: name for name in names})
    train_one(bed, "", "tree/runs/one runs/", copies=1)
    assert (tree / "old/deep/file.py").exists()
    makefile_time = (tree / "Makefile").stat().st_mtime_ns
    trainer_time = (tree / "train.py").stat().st_mtime_ns

    shutil.rmtree(project / "old")
    shutil.rmtree(project / "turns")
    (project / "kept/a.py").unlink()  # from a folder that keeps others
    (project / "plain").unlink()
    trainer = (project / "train.py").read_text()
    write_files(
        {
            project / "turns": "now a file",
            project / "plain/file": "now a folder",
            project / "train.py": trainer + "\n",
            tree / "turns/result": "of the user's own",
        }
    )
    train_one(bed, "--runs=gs://bucket/runs", "its results: gs://bucket/runs/one", copies=1)

    assert not (tree / "old").exists()
    assert [path.name for path in (tree / "kept").iterdir()] == ["b.py"]
    assert (tree / "turns").read_text() == "now a file"
    assert (tree / "plain/file").read_text() == "now a folder"
    # What is not the launcher's own stays.
    assert (tree / "runs/one").exists()
    set_aside = [path.read_text() for path in tree.glob("turns.old-*/*")]
    assert set_aside == ["of the user's own"]
    # make goes by the time: it would install again if requirements.txt looked new.
    assert (tree / "Makefile").stat().st_mtime_ns == makefile_time
    assert (tree / "train.py").stat().st_mtime_ns > trainer_time


@one_worker
def test_a_damaged_copy_is_sent_again(bed):
    train_one(bed, "--runs=gs://bucket/runs", "its results", copies=1)

    os.truncate(bed.zoo(0) / "bundle", 100)
    os.truncate(bed.zoo(0) / "manifest.json", 0)
    train_one(bed, "--runs=gs://bucket/runs", "its results", copies=1)


@one_worker
def test_others_cannot_read_the_copy(bed):
    train_one(bed, "--runs=gs://bucket/runs", "its results", copies=1)

    for folder in (bed.home(0) / "xla-zoo", bed.zoo(0)):
        assert folder.stat().st_mode & 0o777 == 0o700, folder


def test_two_tpus_with_one_home_have_their_own_trees():
    one = hosts.TpuVm("my-tpu")
    assert one.folder(0) == "my-tpu/worker-0"
    assert one.folder(1) == "my-tpu/worker-1"

    other = hosts.TpuVm("her-tpu")
    assert other.folder(0) == "her-tpu/worker-0"

    plain = hosts.SshHosts("ssh:me@a,b", ["me@a", "b"])
    assert plain.folder(0) == "ssh-me_a/worker-0"
    assert plain.folder(1) == "ssh-b/worker-1"


# ---- secrets -----------------------------------------------------------------------------------


SECRETS = {
    ".env": "TOKEN=x",
    "deep/.env.local": "y",
    "deep/key.pem": "z",
    "gcp.json": json.dumps({"type": "service_account", "private_key": "x"}),
}


def test_files_that_look_like_secrets_are_left_out(bed):
    others = {
        "config.json": '{"type": "linear"}',
        "list.json": "[1]",
        "broken.json": "{",
        "environment.env.py": "",
    }
    write_files({bed.project / name: text for name, text in {**SECRETS, **others}.items()})

    bundle = request.make_bundle(bed.project)
    assert sorted(bundle.left_out) == sorted(SECRETS)
    sent = set(names_in(bundle.content))
    assert not sent & set(SECRETS)
    assert set(others) <= sent


def test_what_stays_here_and_what_leads_out_is_named(bed, here):
    write_files({bed.project / name: text for name, text in SECRETS.items()})
    (bed.project / "data").symlink_to("/mnt/data")
    (bed.project / "up").symlink_to("../elsewhere")
    (bed.project / "deep/fine").symlink_to("../train.py")

    code, _, err = here("train", "--run", "one")
    assert code == 0
    secrets = ".env, deep/.env.local, deep/key.pem, gcp.json"
    assert f"left out, since they look like secrets: {secrets}" in err
    links = "data -> /mnt/data, up -> ../elsewhere"
    assert f"links out of the working tree, which are sent as they are: {links}" in err


def test_other_forms_of_secrets_are_known(bed):
    """In capitals, in folders, and in other kinds of accounts' files."""
    large = {"type": "service_account", "private_key": "x" * 70_000}
    impersonated = json.dumps({"type": "impersonated_service_account"})
    secrets = {
        ".ENV": "x",
        "server.PEM": "x",
        "large.json": json.dumps(large),
        "key.JSON": impersonated,
        "bom.json": "\ufeff" + impersonated,
        ".envrc": "export X=y",
    }
    for name, text in secrets.items():
        (bed.project / name).write_text(text, encoding="utf-8")
    write_files({bed.project / ".env-files/x": ""})  # is none
    write_files({bed.project / f"deep/.env/file-{number}": "x" for number in range(30)})

    bundle = request.make_bundle(bed.project)
    assert sorted(bundle.left_out) == sorted([*secrets, "deep/.env/"]), "a folder is named once"


@pytest.mark.parametrize(
    "name, secret",
    [
        ("TOKENIZERS_PARALLELISM", False),
        ("KEYBOARD", False),
        ("PWD", False),
        ("MONKEY_PATCH", False),
        ("hf_token", True),
        ("api_key", True),
        ("PGPASSWD", True),
        ("DB_PWD", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", True),
        ("MySecret", False),
        ("my_SECRET_x", True),
        ("DBPASSWORD", True),
    ],
)
def test_a_secret_variable_is_known_by_the_words_of_its_name(name, secret):
    if not secret:
        assert request.read_environment(f"{name}=x", [])[name] == "x"
        return

    refusal = f"{name} in ENV would stand in this machine's list of processes"
    with pytest.raises(InputError, match=refusal):
        request.read_environment(f"{name}=x", [])
