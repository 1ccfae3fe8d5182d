"""The environment of every test (import path, one thread), and the fixtures that several test files share."""

import gc
import os
import re
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

with suppress(ImportError):  # before distutils, or torch.compile fails in the tests' process
    import setuptools  # noqa: F401
ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PADDOCK_COMMAND", None)  # of ./paddock test; it changes what is printed
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background job, and in all that the tests start there
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The processes that tests start import our modules, the helpers and the functions that tests plant.
FOLDERS = (ROOT, TESTS := ROOT / "tests", *sorted({path.parent for path in TESTS.glob("*/**/*.py")}))
sys.path[:0] = map(str, FOLDERS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*map(str, FOLDERS), os.environ.get("PYTHONPATH"))))

# The outcome must not depend on time, earlier runs or chance; too_slow, too, is a matter of time.
settings.register_profile("paddock", deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paddock")

# What CI's machine may lack. Under CI every other skip is a failure: a missing oracle would make its tests vanish.
MAY_BE_MISSING = (
    "needs a GPU", "no GPU is here", "a GPU is here", "is a CPU build",
    "compiled once on a CPU", "selective is the compiler's", "ATTENTION_BACKEND=",  # test_gpu.py on a CPU
    "its path has a space",  # .ci/tests runs these tests by another path
    "needs root", "need root", "no such address",
    "folder of real data", "among the real data", "not a git checkout",
    "vllm is not installed", "LLAMA_CPP",
    *(["'trl"] if sys.version_info < (3, 11) else []))  # needs Python 3.11


def refuse_skip(report):
    """Return a report; under CI it fails if its test was skipped and MAY_BE_MISSING does not name the reason."""
    if os.environ.get("CI", "") in ("", "false", "0") or not report.skipped or hasattr(report, "wasxfail"):
        return report
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not re.search("|".join(map(re.escape, MAY_BE_MISSING)), reason):
        report.outcome = "failed"
        report.longrepr = f"{reason}; CI must have it: install it, or name it in MAY_BE_MISSING (tests/conftest.py)"
    return report


def pytest_collection_modifyitems(items):
    """Test files that start processes or browsers come first: their tests take long, and a file is one worker's."""
    items.sort(key=lambda item: not {"system", "scripts", "style", "parallel", "report", "serving"} & {*item.path.parent.relative_to(ROOT).parts})


def pytest_runtest_setup(item):
    if item.get_closest_marker("compiler"):
        from config import Config
        from model_utils import why_not_compile

        if reason := why_not_compile(Config(compile=True), "cpu"):
            pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage among what is imported, now or in the tests: all of it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    return report if item.get_closest_marker("gpu") else refuse_skip(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return refuse_skip((yield))


@pytest.fixture(autouse=True)
def no_broken_trackers():
    """Forget trackers that a test broke: they would end pytest at the exit of a later test's program."""
    yield
    if "parallel.process" in sys.modules:
        sys.modules["parallel.process"].STUCK.clear()


@pytest.fixture(autouse=True)
def no_typed_command():
    """Forget the command that a test called in this process: later programs would print it as theirs."""
    yield
    os.environ.pop("PADDOCK_COMMAND", None)


@pytest.fixture
def no_hang():
    """Fail a test that blocks for minutes, for example in opening a pipe."""
    earlier = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))  # which no `except Exception` catches
    signal.alarm(240)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, earlier)


@pytest.fixture
def nvml(monkeypatch):
    """A function that puts a machine with NVML in place of this one."""
    from nvml_stub import Pynvml

    def install(fails: str = "") -> Pynvml:
        module = Pynvml(fails)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return install


@pytest.fixture(scope="module")
def browser():
    """Chromium. Not for the whole session: while it is open, no other test could call asyncio.run."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (requirements-dev.txt)")
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    with playwright.sync_playwright() as driver:
        if not (found or Path(driver.chromium.executable_path).exists()):
            pytest.skip("there is no Chromium (apt-get install chromium, or playwright install chromium)")
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """A function that opens a page; the test fails at its end if a page complained, or asked for something elsewhere."""
    pages = []

    def open_page(url: str, width: int = 1440, scheme: str = "light", height: int = 900, heard: tuple[str, ...] = ()):
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce")
        page.heard, page.expected = [], (url.rpartition("/")[0], "data:", *heard)
        page.on("console", lambda message: page.heard.append(message.text))
        page.on("pageerror", lambda error: page.heard.append(str(error)))
        page.on("request", lambda request: page.heard.append(request.url))
        page.set_default_timeout(120_000)
        page.goto(url)
        pages.append(page)
        return page

    yield open_page
    heard = [each for page in pages for each in page.heard if not each.startswith(page.expected)]
    for page in pages:
        page.close()
    assert heard == []


@pytest.fixture(scope="session")
def violations():
    """A function that returns what axe-core finds wrong with a page, and where."""
    package = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed (requirements-dev.txt)")
    source = (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")

    def find(page) -> list:
        page.evaluate(source)
        return page.evaluate("async () => (await axe.run()).violations.map(({id, nodes}) => [id, nodes.map(({target}) => target.join(' '))])")

    return find


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets; without it, tests that need it are skipped."""
    folder = Path(os.environ.get("PADDOCK_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not os.path.isdir(folder):  # Path.is_dir raises an error where the parent folder may not be entered
        pytest.skip("no folder of real data; set PADDOCK_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """The tiny data set, tokenizer and HellaSwag items that most runs of the tests read."""
    from factories import prepare

    return prepare(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="session")
def tokenizer_path(prepared) -> str:
    """The smallest tokenizer in tiktoken's format: the 256 bytes."""
    return str(prepared.tokenizer)


@pytest.fixture(scope="session")
def stages(prepared, tmp_path_factory):
    """Data for the later stages, a base and a teacher; tests that change them work on a copy."""
    from factories import prepare_stages

    return prepare_stages(prepared, tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="session")
def whole(prepared, tmp_path_factory):
    """A finished run that nothing interrupted; tests that change its files work on a copy."""
    from factories import TinyRun

    return TinyRun(prepared, tmp_path_factory.mktemp("whole")).trained()


@pytest.fixture(scope="session")
def whole_on_two_ranks(prepared, tmp_path_factory):
    """The same on two ranks."""
    from factories import TinyRun

    run = TinyRun(prepared, tmp_path_factory.mktemp("whole-on-two-ranks"))
    run.ends([0, 0])
    return run


@pytest.fixture(scope="session")
def tokenizer(prepared):
    """The tokenizer of the tiny data set."""
    from tokenizer import load_tokenizer

    return load_tokenizer(str(prepared.tokenizer))


@pytest.fixture
def tiny_run(prepared, tmp_path):
    """A function that makes a TinyRun with some settings changed."""
    from factories import TinyRun

    return lambda **settings: TinyRun(prepared, tmp_path / "runs", **settings)


@pytest.fixture(scope="module")
def folder(native, tmp_path_factory):
    """A folder with the Hugging Face files of `native`, a tokenizer fixture of the test file."""
    folder = tmp_path_factory.mktemp("huggingface")
    native.save_huggingface(folder)
    return folder


@pytest.fixture(scope="module")
def hf_tokenizer(folder):
    """The tokenizer in `folder`, loaded with the tokenizers library."""
    from tokenizer import load_tokenizer

    return load_tokenizer(str(folder))


@pytest.fixture(scope="session")
def transformers():
    """The oracle of many tests."""
    return pytest.importorskip("transformers", reason="the oracle of these tests: pip install -r requirements-dev.txt")


@pytest.fixture(scope="module")
def transformers_tokenizer(folder, transformers):
    """The tokenizer in `folder`, loaded with transformers."""
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def meta(real_data):
    """The tokenizer of Llama 3."""
    from tokenizer import load_tokenizer

    path = real_data / "llama3_tokenizer.model"
    if not path.is_file():
        pytest.skip("no llama3_tokenizer.model in the folder of real data")
    return load_tokenizer(str(path))
