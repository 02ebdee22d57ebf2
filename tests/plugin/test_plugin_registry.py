"""Discovery: every distribution is kept, load errors are shown, and repeated loading changes nothing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
from plugin_zoo import zoo_spec

from lowlat_plugin import Code, Refused, Registry, discover
from lowlat_plugin.registry import GROUP, implementation


def make_distribution(root: Path, name: str, module: str, source: str, version: str = "1.0") -> None:
    (root / f"{module}.py").write_text(textwrap.dedent(source))
    info = root / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nkernels = {module}:SPECS\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("sitemod_")]:
        del sys.modules[name]


GOOD = "from plugin_zoo import zoo_spec\nSPECS = [zoo_spec('TorchKernel')]\n"


def found_in(site: Path) -> Registry:
    points = [p for d in metadata.distributions(path=[str(site)]) for p in d.entry_points if p.group == GROUP]
    return discover(entry_points=points)


def test_two_distributions_with_the_same_entry_name_are_both_listed(site):
    make_distribution(site, "kernels-one", "sitemod_one", GOOD)
    make_distribution(site, "kernels-two", "sitemod_two", GOOD.replace("[", "lambda: [", 1), version="2.1")
    registry = found_in(site)
    assert [(c.key, c.version) for c in registry.candidates] == [
        ("kernels-one/torchkernel", "1.0"),
        ("kernels-two/torchkernel", "2.1"),
    ]
    assert not registry.failures
    assert [c.key for c in registry.for_model("cpu", "LlamaForCausalLM")] == [c.key for c in registry.candidates]
    assert registry.for_model("amd", "LlamaForCausalLM") == ()


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("import no_such_module_at_all", Code.LOAD_FAILED, "no_such_module_at_all"),
        ("raise SystemExit(3)", Code.LOAD_FAILED, "SystemExit"),
        ("SPEC = 1", Code.LOAD_FAILED, "SPECS"),
        ("SPECS = 7", Code.LOAD_FAILED, "int"),
        ("SPECS = ['a word']", Code.NOT_A_SPEC, "str"),
        ("def SPECS():\n    raise ValueError('built for another interface')", Code.LOAD_FAILED, "another interface"),
        (
            "from plugin_zoo import zoo_spec\nSPECS = [zoo_spec(), zoo_spec(vendor='amd')]",
            Code.DUPLICATE,
            "two different specs",
        ),
    ],
)
def test_load_errors_are_kept_beside_what_loads(site, source, code, said):
    make_distribution(site, "kernels-broken", "sitemod_broken", source)
    make_distribution(site, "kernels-good", "sitemod_good", GOOD)
    registry = found_in(site)
    assert "kernels-good/torchkernel" in [c.key for c in registry.candidates]
    [failure] = registry.failures
    assert failure.distribution == "kernels-broken"
    assert failure.reason.code == code
    assert said in str(failure.reason)
    if code is not Code.DUPLICATE:
        with pytest.raises(Refused) as refusal:
            registry.named("kernels-broken")
        assert refusal.value.reasons == (failure.reason,)


def test_names_and_unknown_names():
    registry = Registry()
    registry.register(zoo_spec(), "a")
    registry.register(zoo_spec(), "a")
    registry.register(zoo_spec("NeverRight"), "b")
    assert len(registry.candidates) == 2
    assert [c.key for c in registry.named("a")] == ["a/torchkernel"]
    assert [c.key for c in registry.named("neverright")] == ["b/neverright"]
    assert [c.key for c in registry.named("b/neverright")] == ["b/neverright"]
    with pytest.raises(Refused, match="a/torchkernel, b/neverright"):
        registry.named("torch-kernel")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no colon", "module:attribute"),
        ("no_such_module:Kernel", "no_such_module"),
        ("plugin_zoo:NoSuchKernel", "NoSuchKernel"),
        ("plugin_meeting:Mailbox", "TypeError|subclass|Mailbox"),
        ("plugin_zoo:RaisesInConstructor", "libmissing"),
    ],
)
def test_implementations_that_do_not_load_are_refused_by_name(path, said):
    with pytest.raises(Refused, match=said) as refusal:
        implementation(zoo_spec(implementation=path))
    assert refusal.value.reasons[0].code == Code.LOAD_FAILED


def test_importing_the_contract_needs_neither_torch_nor_the_runtime():
    source = "import sys, lowlat_plugin; print({'torch', 'numpy', 'lowlat'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
