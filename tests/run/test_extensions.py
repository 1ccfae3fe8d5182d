"""The loader of extensions, and what a run calls of them."""

import sys
from contextlib import nullcontext
from types import ModuleType

import pytest
from factories import UNMEASURED

from common.errors import SettingsError
from config import Config
from learn import optim
from run.extensions import Extension, find, load_extensions


def test_extensions_come_in_the_order_of_the_default_and_others_after_them(monkeypatch):
    module = ModuleType("extensions.mine")
    module.EXTENSION = type("Mine", (Extension,), {})
    monkeypatch.setitem(sys.modules, "extensions.mine", module)
    found = load_extensions(Config(extensions="mine, profile,guards"), pytest.fail)
    assert [type(each).__name__ for each in found] == ["Guards", "Measurements", "Mine"]
    assert load_extensions(Config(extensions=""), pytest.fail) == []
    both = Config(extensions="mine, default").extension_names
    assert both == [*Config().extension_names, "mine"] and Config(extensions="default").extensions == Config().extensions


def test_a_missing_extension_is_an_error_if_set_and_a_warning_by_default(monkeypatch):
    with pytest.raises(SettingsError, match="^EXTENSIONS: extensions/ has no gards; remove it$"):
        load_extensions(Config(extensions="guards,gards"), pytest.fail)
    warnings = []
    monkeypatch.setitem(sys.modules, "extensions.guards", None)  # as if there were no such file
    found = load_extensions(Config(), warnings.append)
    assert warnings == ["EXTENSIONS: the run continues without guards, which extensions/ does not have"]
    assert len(found) == len(Config().extension_names) - 1


def test_a_setting_of_a_missing_extension_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "extensions.forecast", None)
    with pytest.raises(SettingsError, match="^--check needs extensions/forecast.py, which does not exist$"):
        find("forecast", "--check")
    monkeypatch.setattr(optim, "REDUCERS", {})
    with pytest.raises(SettingsError, match="^REPRODUCIBLE=true needs extensions/reproducible.py, and its name in EXTENSIONS"):
        optim.make_reducer(None, None, Config(reproducible=True), None)


class Recorder(Extension):
    """Records what is called, and masks nothing."""

    def __init__(self):
        self.calls: list[str] = []

    def __getattribute__(self, name):
        if name in vars(Extension) and not name.startswith("_") and name != "phase":
            self.calls.append(name)
        return object.__getattribute__(self, name)

    def phase(self, name):
        self.calls.append(f"phase {name}")
        return nullcontext()


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    found, module = Recorder(), ModuleType("extensions.recorder")
    module.EXTENSION = lambda: found
    monkeypatch.setitem(sys.modules, "extensions.recorder", module)
    return found


def test_a_run_calls_each_hook_at_its_place_and_without_extensions_it_is_the_same(tiny_run, recorder, whole):
    tiny_run(EXTENSIONS="recorder,evaluate", MAX_STEPS=2, VALIDATE_EVERY=0, HELLASWAG_EVERY=0, SAMPLE_EVERY=0, MICRO_BATCH_SIZE=8).trained()
    step = ["step_begin", "phase data", "batches", "phase optimizer", "phase forward", "phase forward", "phase backward", "before_update",
            "phase communication", "step_end", "metrics", "further_evaluations", "evaluate"]
    hooks = [name for name in recorder.calls if name != "phase save"]
    assert hooks == ["inputs", "load_state_dict", "run_start", "further_evaluations", "evaluate", *step, *step, "state_dict", "checkpoint_texts", "saved", "summary", "run_end"]
    plain = tiny_run(EXTENSIONS="guards,evaluate", MAX_STEPS=2, RUN_NAME="plain", **UNMEASURED).trained()
    assert plain.lines("ledger") == whole.lines("ledger")[:2]
    first = plain.lines("metrics")[0]
    assert first["tokens_per_second"] == pytest.approx(256 / first["step_seconds"])
