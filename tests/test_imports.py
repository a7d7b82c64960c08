"""Start-up stays light: what a command does not need is not imported."""

import subprocess
import sys

HEAVY = ("torch", "wandb", "datasets", "triton", "matplotlib", "pandas")


def modules_after(code: str) -> set[str]:
    report = f"{code}\nimport sys; print('\\n' + ' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_the_package_imports_nothing_heavy():
    assert modules_after("import normexp") == set()


def test_help_imports_neither_torch_nor_wandb():
    code = (
        "import contextlib\nfrom normexp.train import main\nwith contextlib.suppress(SystemExit):\n    main(['--help'])"
    )
    assert modules_after(code) & {"torch", "wandb", "datasets", "triton"} == set()


def test_a_config_mistake_imports_no_wandb_or_triton():
    code = "from normexp.train import main\nassert main(['norm=rsm']) == 2"
    assert modules_after(code) & {"wandb", "datasets", "triton"} == set()
