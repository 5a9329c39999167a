"""The module files, the container and the batch script in examples/cluster: as far as any machine can test them."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from commlib.cli.warm import settings_for

ROOT = Path(__file__).parents[3]
HERE = ROOT / "examples" / "cluster"
CPU = "x86-64-v3"
SETTINGS = {"COMMLIB_KERNELS": "/apps/commlib/0.1.0/kernels", **settings_for(CPU)}


def sections(text: str) -> dict[str, str]:
    """Return the sections of a definition for Apptainer, by name; "" is the header."""
    parts = re.split(r"^%(\w+)\n", text, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


@pytest.fixture(scope="module")
def container() -> dict[str, str]:
    return sections((HERE / "commlib.def").read_text())


def test_the_container_uses_only_sections_of_apptainer(container: dict[str, str]) -> None:
    known = {"", "files", "post", "environment", "runscript", "test", "labels", "help"}
    assert set(container) == known
    header = [line.split(": ") for line in container[""].splitlines() if line and not line.startswith("#")]
    assert dict(header) == {"Bootstrap": "docker", "From": "debian:12-slim"}


def test_files_copied_into_the_container_suffice_to_install(container: dict[str, str]) -> None:
    copied = dict(line.split() for line in container["files"].splitlines() if line.strip())
    assert all((ROOT / source).exists() and to == f"/opt/source/{source}" for source, to in copied.items())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {Path(package).parts[0] for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    assert needed == set(copied)
    (extras,) = re.findall(r'"/opt/source\[([\w,]+)\]"', container["post"])
    assert set(extras.split(",")) <= project["project"]["optional-dependencies"].keys()


@pytest.mark.parametrize("section", ["post", "environment", "runscript", "test"])
def test_scripts_of_the_container_parse(container: dict[str, str], section: str) -> None:
    subprocess.run(["sh", "-n"], input=container[section], text=True, check=True)


def test_packages_of_the_container_exist_in_debian(container: dict[str, str]) -> None:
    if shutil.which("apt-cache") is None or 'VERSION_ID="12"' not in Path("/etc/os-release").read_text():
        pytest.skip("this is not Debian 12")
    (line,) = re.findall(r"apt-get install (.*)", container["post"])
    packages = [word for word in line.split() if not word.startswith("-")]
    done = subprocess.run(["apt-cache", "show", "--no-all-versions", *packages], capture_output=True, text=True)
    if not done.stdout:
        pytest.skip("apt has no lists of packages here")
    assert re.findall(r"^Package: (.*)", done.stdout, re.MULTILINE) == packages


def test_jobs_in_the_container_find_its_kernels(container: dict[str, str]) -> None:
    exported = dict(re.findall(r"export (\w+)=(\S*)", container["environment"]))
    warm = re.findall(r"COMMLIB_KERNELS=(\S+) \S+/commlib warm (.*)", container["post"])
    assert warm == [(exported["COMMLIB_KERNELS"], f"--all --cpu {CPU}")]
    assert {name: exported[name] for name in settings_for(CPU)} == settings_for(CPU)


def test_both_module_files_set_the_same_variables() -> None:
    lua, tcl = (HERE / "commlib.lua").read_text(), (HERE / "commlib.tcl").read_text()
    (root,) = re.findall(r'^local root = "(\S+)"', lua, re.MULTILINE)
    calls = re.findall(r'^setenv\("(\w+)", (.*?)\)(?:\s+--.*)?$', lua, re.MULTILINE)

    def value(text: str) -> str:
        if match := re.fullmatch(r'pathJoin\(root, "(\w+)"\)', text):
            return f"{root}/{match[1]}"
        return root if text == "root" else text.strip('"')

    by_lua = {name: value(text) for name, text in calls}
    assert by_lua == {"VIRTUAL_ENV": root, **SETTINGS}
    tcl_root = re.findall(r"^set root (\S+)", tcl, re.MULTILINE)
    calls = re.findall(r"^setenv (\w+) (\S+)", tcl, re.MULTILINE)
    assert {name: text.replace("$root", *tcl_root).strip('"') for name, text in calls} == by_lua


STUBS = """
proc module-whatis {text} {}
proc conflict {name} {}
proc prereq {name} {}
proc prepend-path {name value} {puts "prepend $name $value"}
proc setenv {name value} {puts "set $name $value"}
source [lindex $argv 0]
ModulesHelp
"""


def test_the_tcl_module_file_runs(tmp_path: Path) -> None:
    if shutil.which("tclsh") is None:
        pytest.skip("there is no tclsh")
    (tmp_path / "stubs.tcl").write_text(STUBS)
    command = ["tclsh", str(tmp_path / "stubs.tcl"), str(HERE / "commlib.tcl")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "commlib info" in done.stderr, done.stderr
    root = "/apps/commlib/0.1.0"
    expected = [f"prepend PATH {root}/bin", f"set VIRTUAL_ENV {root}"]
    assert done.stdout.splitlines() == expected + [f"set {name} {value}" for name, value in SETTINGS.items()]


def test_the_batch_script_parses_and_starts_existing_files() -> None:
    script = HERE / "requeue.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    options = re.findall(r"^#SBATCH (--[\w-]+)", text, re.MULTILINE)
    assert {"--signal", "--requeue", "--time", "--open-mode"} <= set(options)
    (program,) = re.findall(r"python (\S+)", text)
    assert (ROOT / program).is_file()
