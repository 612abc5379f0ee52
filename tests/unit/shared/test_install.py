"""The install command: which Python, which .venv, what pip is asked for. No network."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

import install_and_run
from hearth.shared.processes import process_started
from install_and_run import PROJECT, VERSION, Stop, only_one

pytestmark = pytest.mark.process

BASE_PYTHON = Path(sys.base_prefix, "bin", f"python{VERSION}")
OTHER = "3.12" if VERSION != "3.12" else "3.13"


def old_python(version: str) -> Path:
    found = sorted(Path("/root/.pyenv/versions").glob(f"{version}.*/bin/python"))
    if not found:
        pytest.skip(f"no Python {version} in /root/.pyenv/versions")
    return found[-1]


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A clean .venv of this Python, made by links in no time."""
    made = tmp_path / ".venv"
    (made / "bin").mkdir(parents=True)
    (made / "lib" / f"python{VERSION}" / "site-packages").mkdir(parents=True)
    (made / "bin" / "python").symlink_to(BASE_PYTHON)
    (made / "bin" / f"python{VERSION}").symlink_to("python")
    (made / "pyvenv.cfg").write_text(f"home = {BASE_PYTHON.parent}\nversion = {VERSION}.1\n")
    executable(made / "bin" / "pip", f"#!{made}/bin/python\nimport pip\n")
    return made


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project directory whose pyproject.toml asks for one package."""
    monkeypatch.setattr(install_and_run, "PROJECT", tmp_path)
    declare(tmp_path, "tiny")
    return tmp_path


def declare(project: Path, *dependencies: str) -> None:
    (project / "pyproject.toml").write_text(
        f"[project]\nname = 'project'\nversion = '1.0'\ndependencies = {list(dependencies)}\n"
        "[project.optional-dependencies]\ndev = ['pytest']\ncuda = []\n"
    )


def no_install(*arguments: object) -> NoReturn:
    raise AssertionError("an install was begun")


# ---- which Python ----


@pytest.mark.parametrize("version", ["3.6", "3.7", "3.8", "3.9"])
def test_an_old_python_compiles_the_command_and_shows_its_help(version: str) -> None:
    python = old_python(version)
    command = [python, "-W", "error", PROJECT / "install_and_run.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--workers N" in done.stdout


def test_shims_that_fail_and_pythons_that_lie_about_their_version_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for version in install_and_run.SUPPORTED:
        executable(tmp_path / "shims" / f"python{version}", "#!/bin/sh\necho no; exit 127\n")
    executable(tmp_path / "lying" / f"python{OTHER}", f'#!/bin/sh\nexec {BASE_PYTHON} "$@"\n')
    real = tmp_path / ".pyenv" / "versions" / f"{VERSION}.1" / "bin" / f"python{VERSION}"
    executable(real, f'#!/bin/sh\nexec {BASE_PYTHON} "$@"\n')
    monkeypatch.setenv("PATH", os.pathsep.join([f"{tmp_path}/shims", f"{tmp_path}/lying"]))
    found = install_and_run.find_interpreter()
    assert found and os.path.samefile(found, BASE_PYTHON)


def test_3_12_is_looked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in install_and_run.SUPPORTED:
        executable(tmp_path / f"python{version}", "")
    monkeypatch.setattr(install_and_run.platform, "machine", lambda: "m1")
    monkeypatch.setattr(
        install_and_run, "output_of", lambda command: f"{command[0][-4:]} m1 {command[0]}"
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install_and_run.find_interpreter() == str(tmp_path / "python3.12")


@pytest.mark.parametrize(
    ("system", "machine", "release", "said"),
    [
        ("Darwin", "x86_64", "15.1", "needs Apple silicon"),
        ("Darwin", "arm64", "13.6", "macOS 13.6, and MLX needs 14"),
        ("Windows", "AMD64", "", "WSL 2"),
        ("Linux", "riscv64", "", "Linux on riscv64"),
        ("", "", "", "an unknown system"),
        ("Darwin", "arm64", "14.0", None),
        ("Darwin", "arm64", "10.16", None),  # what old Pythons take every newer macOS for
        ("Linux", "x86_64", "", None),
        ("Linux", "aarch64", "", None),
    ],
)
def test_a_platform_without_mlx_is_refused_with_the_reason(
    system: str, machine: str, release: str, said: str | None
) -> None:
    problem = install_and_run.platform_problem(system, machine, release)
    assert problem is None if said is None else said in (problem or "")


FAKE_UV = """#!/bin/sh
echo "$@" >> {calls}
case "$2" in
  install) {install} ;;
  find) test "$4" = {version} && test -e {python} && echo {python} ;;
esac
"""


@pytest.mark.parametrize("can_fetch", [True, False])
def test_uv_fetches_a_python_where_none_is_found(
    can_fetch: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    python, calls = tmp_path / "uv" / f"python{VERSION}", tmp_path / "calls"
    if Path("/usr/local/bin", f"python{VERSION}").exists():
        pytest.skip("a supported Python is in /usr/local/bin, which is always searched")
    made = f"/bin/mkdir {python.parent} && /bin/ln -s {BASE_PYTHON} {python}"
    words = {"calls": calls, "install": made if can_fetch else "exit 2", "python": python}
    executable(tmp_path / ".local" / "bin" / "uv", FAKE_UV.format(version=VERSION, **words))
    monkeypatch.setattr(install_and_run, "SUPPORTED", (VERSION,))
    monkeypatch.setattr(install_and_run, "is_usable_here", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda path, words, environ: became.append(words))
    if can_fetch:
        install_and_run.change_interpreter(["--check"])
        ((found, *rest),) = became
        assert os.path.samefile(found, BASE_PYTHON)
        assert rest == [str(PROJECT / "install_and_run.py"), "--check"]
        install_and_run.change_interpreter([])  # a second start finds it
    else:
        with pytest.raises(Stop, match="run the same command again"):
            install_and_run.change_interpreter([])
    assert calls.read_text().splitlines().count(f"python install {VERSION}") == 1
    assert capfd.readouterr().err.count(f"uv fetches Python {VERSION}") == 1


# ---- which .venv ----


def test_a_clean_venv_of_any_patch_release_has_no_artefacts_also_behind_a_link(
    venv: Path, tmp_path: Path
) -> None:
    (venv / "pyvenv.cfg").write_text(f"home = {BASE_PYTHON.parent}\nversion = {VERSION}.99\n")
    (tmp_path / "alias").symlink_to(tmp_path)
    for path in (venv, tmp_path / "alias" / ".venv"):
        assert install_and_run.checked_version(path) == VERSION


EXEC = "#!/bin/sh\n'''exec' \"/my disk/bin/python3\" \"$0\" \"$@\"\n' '''\n"


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        ("bin/python3.14", "", "bin/python3.14 is not of Python"),
        ("lib/python3.14", "", "lib/python3.14 is not of Python"),
        ("bin/pip3", "#!/opt/3.14/bin/python3.14 -s\n", "bin/pip3 runs /opt/3.14/bin/python3.14"),
        ("bin/pip3", EXEC, "bin/pip3 runs /my disk/bin/python3"),
        ("pyvenv.cfg", "home = /usr/bin\nversion = 3.14.0\n", "pyvenv.cfg says Python 3.14"),
    ],
)
def test_a_contaminated_venv_is_refused_by_naming_what_is_wrong_and_how_to_mend_it(
    venv: Path, path: str, text: str, named: str
) -> None:
    executable(venv / path, text)
    with pytest.raises(Stop) as refusal:
        install_and_run.checked_version(venv)
    assert named in str(refusal.value)
    assert f"rm -rf '{venv}'" in str(refusal.value)


def test_a_venv_whose_python_is_gone_is_refused(venv: Path) -> None:
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to("/opt/gone/bin/python3.12")
    with pytest.raises(Stop, match=r"bin/python, a link to /opt/gone/bin/python3\.12, does not"):
        install_and_run.checked_version(venv)


def test_a_half_made_venv_is_not_refused(venv: Path) -> None:
    (venv / "bin" / "python").unlink()
    assert install_and_run.checked_version(venv) is None


def test_a_python_that_would_install_outside_of_venv_is_not_taken_for_its_own(venv: Path) -> None:
    (venv / "pyvenv.cfg").unlink()
    assert install_and_run.venv_version(venv) is None


# ---- what is installed ----


def test_cuda_replaces_the_cpu_build_because_both_bring_the_same_library() -> None:
    pyproject = PROJECT / "pyproject.toml"
    plain = install_and_run.requirements(pyproject, [])
    cuda = install_and_run.requirements(pyproject, ["cuda"])
    on_linux = [text for text in cuda if text.startswith("mlx[")]
    assert any(text.startswith("mlx[cpu]") for text in plain)
    assert len(on_linux) == 1 and on_linux[0].startswith("mlx[cuda")
    assert any(text.startswith("mlx>=") and "darwin" in text for text in cuda)


def finish(venv: Path, *extras: str) -> None:
    install_and_run.write_stamp(venv, install_and_run.wanted_stamp(venv, list(extras), VERSION))


def test_a_second_start_with_nothing_changed_installs_nothing(
    venv: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(venv)
    monkeypatch.setattr(install_and_run, "install", no_install)
    install_and_run.prepare(venv, [])


def test_changed_requirements_another_extra_another_python_and_no_stamp_each_install_again(
    venv: Path, project: Path
) -> None:
    finish(venv)
    assert not install_and_run.is_current(venv, ["dev"])
    declare(project, "other")
    assert not install_and_run.is_current(venv, [])
    finish(venv)
    assert install_and_run.is_current(venv, [])
    stamp = install_and_run.read_stamp(venv)
    for wrong in ({"python": OTHER}, {"requirements": []}):
        install_and_run.write_stamp(venv, stamp | wrong)
        assert not install_and_run.is_current(venv, [])
    (venv / "installed.json").write_text("[")
    assert not install_and_run.is_current(venv, [])


def test_vision_is_installed_unless_it_is_left_out_and_venv_keeps_that_choice(
    venv: Path, project: Path
) -> None:
    def extras_after(*added: str) -> list[str]:
        finish(venv, *added)
        return list(install_and_run.read_stamp(venv)["extras"])

    assert extras_after() == ["vision"]
    assert extras_after("no-vision") == ["no-vision"]
    assert extras_after("cuda") == ["cuda", "no-vision"]
    assert install_and_run.is_current(venv, [])
    assert not install_and_run.is_current(venv, ["vision"])
    assert extras_after("vision") == ["cuda", "vision"]
    assert extras_after() == ["cuda", "vision"]


def test_a_checkout_that_was_moved_is_installed_again(
    venv: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(venv)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(project / "pyproject.toml", elsewhere)
    monkeypatch.setattr(install_and_run, "PROJECT", elsewhere)
    assert not install_and_run.is_current(venv, [])


def test_a_package_whose_unpacking_was_cut_short_is_installed_again(venv: Path) -> None:
    site = venv / "lib" / f"python{VERSION}" / "site-packages"
    for name in ("whole", "cut"):
        (site / f"{name}-1.dist-info").mkdir()
    (site / "whole-1.dist-info" / "INSTALLER").write_text("pip\n")
    install_and_run.forget_half_installed(venv)
    assert [path.name for path in site.iterdir()] == ["whole-1.dist-info"]


def test_env_is_written_once_for_this_user_only(tmp_path: Path) -> None:
    (tmp_path / ".env.example").write_text("WORKERS=1\n")
    install_and_run.write_env(tmp_path)
    assert (tmp_path / ".env").read_text() == "WORKERS=1\n"
    assert stat.S_IMODE((tmp_path / ".env").stat().st_mode) == 0o600
    (tmp_path / ".env").write_text("WORKERS=2\n")
    install_and_run.write_env(tmp_path)
    assert (tmp_path / ".env").read_text() == "WORKERS=2\n"


# ---- its steps: one at a time, and an interrupt ends what runs ----


WAITING = """
import sys
from pathlib import Path
import install_and_run
directory = Path(sys.argv[1])
def run(arguments):
    for number in (2, 15):
        install_and_run.signal.signal(number, install_and_run.on_signal)
    with install_and_run.only_one(directory) as lock:
        script = f"echo $$ > pid; {sys.argv[2]}; exec sleep 60"
        install_and_run.step(["/bin/sh", "-c", f"cd '{directory}'; {script}"], lock)
install_and_run.run = run
sys.exit(install_and_run.main([]))
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_install_ends_pip(number: int, status: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITING, str(tmp_path), "echo Collecting x"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=PROJECT, stderr=pipe, text=True) as install:
        assert install.stderr is not None
        assert any("Collecting x" in line for line in install.stderr)
        pid = int((tmp_path / "pid").read_text())
        install.send_signal(number)
        assert install.wait(30) == status, "not after the 60 s that it would take"
        assert "Interrupted. Run the same command again" in install.stderr.read()
    assert process_started(pid) is None


@pytest.mark.parametrize("attempt", range(2))
def test_an_interrupt_amid_the_start_of_pip_ends_it_too(attempt: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITING, str(tmp_path), "kill -TERM $PPID"]
    assert subprocess.run(command, cwd=PROJECT, check=False, timeout=30).returncode == 143
    assert process_started(int((tmp_path / "pid").read_text())) is None


def test_the_default_model_is_fetched_once_whether_it_is_given_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[list[str]] = []

    def take(command: list[str], lock: int) -> NoReturn:
        steps.append(command[1:])
        raise Stop("Installing failed")

    install_and_run.write_stamp(tmp_path, {"extras": ["vision"]})
    monkeypatch.setattr(install_and_run, "step", take)
    monkeypatch.setattr(install_and_run, "output_of", lambda command: "smollm2")
    for _ in range(2):
        install_and_run.fetch_model(tmp_path)
    assert steps == [["-P", "-m", "hearth.commands.main", "pull", "smollm2"]]
    assert f"Fetch it later: '{tmp_path}/bin/hearth' pull" in capsys.readouterr().err


def test_a_second_install_in_the_same_directory_waits_for_the_first(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from install_and_run import only_one\n"
        "with only_one(Path(sys.argv[1])): print('mine', flush=True)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    pipe = subprocess.PIPE
    with only_one(tmp_path):
        second = subprocess.Popen(command, cwd=PROJECT, stdout=pipe, stderr=pipe, text=True)
        assert second.stderr and "waiting for it" in second.stderr.readline()
        assert second.poll() is None
    with second:
        assert second.stdout and second.stdout.read() == "mine\n"
    assert list(tmp_path.iterdir()) == []
