"""What a plan prints: where its settings come from, what they mean, and what is probably a mistake."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from common.text import command, without_passwords
from config import EXTENSION_SECTIONS, KIND_OF_STAGE, SECTIONS, SETTINGS_OF_EXTENSIONS, Config, on_resume
from plan.layers import PRESETS_DIR, Layer, Values, exported
from plan.names import assignments, misspelled, shortened
from plan.starts import Start


def assigned(values: Mapping[str, Any]) -> str:
    return assignments({name: value for name, value in values.items()
                        if value != Config.model_fields[name].default}, ", ")


def notes_on_layers(layers: Sequence[Layer], given: Values, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the settings that a preset overrides or the environment sets, and the libraries' variables."""
    overridden = [f"{name.upper()}={value}" for name, (value, where) in given.items()
                  if where.startswith(str(PRESETS_DIR)) and {str(value), where}.isdisjoint(
                      map(str, layers[0].values.get(name, (value,))))]
    if overridden:
        yield f"From the preset, which overrides .env: {', '.join(overridden)}"
    places: dict[str, list[str]] = {}  # a file may be meant for another stage
    for name, (value, where) in given.items():
        file, _, line = where.rpartition(":")
        if (where == "environment" and name != "world_size"  # set by torchrun
                or line.isdigit() and not file.startswith(str(PRESETS_DIR))):
            shown = f"{name.upper()}={shortened(without_passwords(str(value)))}"
            places.setdefault(file or "the environment", []).append(shown)
    yield from (f"From {place}: {', '.join(values)}" for place, values in places.items())
    for where, same in ((".env", True), ("the environment, which overrides .env", False)):
        names = [name for name, value in exported(layer for layer in layers if layer.is_env).items()
                 if (environ.get(name, value) == value) is same]
        if names:
            yield f"For the libraries, from {where}: {', '.join(names)}"


def notes_on_start(start: Start, config: Config) -> Iterator[str]:
    """Yield from which step, or from which weights, the run starts."""
    where = "" if start.is_own else f" of {start.folder}"
    if start.kind == "continue" and not start.is_own and config.start_step is not None:
        yield f"continuing step {start.step}{where} as step {config.start_step}"
    elif start.kind == "continue":
        yield f"resuming after step {start.step}{where}"
    elif start.folder:
        yield f"weights from {start.folder}; optimizer, schedule and step restart"


def no_step_left(start: Start, config: Config) -> Iterator[str]:
    """Yield an error if a new run would start at its end; it is not an error to repeat a finished run."""
    if start.kind != "new" and not start.is_own and config.start_step is not None:
        if config.start_step >= max(1, config.max_steps):
            yield (f"START_STEP={config.start_step} leaves no step of MAX_STEPS={config.max_steps}; lower "
                   "it, or raise MAX_STEPS")
    elif start.kind == "continue" and not start.is_own and start.step >= config.max_steps:
        ways = "to train on from its weights, set RESET_OPTIMIZER=true; to continue it, raise MAX_STEPS"
        if start.setting == "resume":
            ways = "raise MAX_STEPS, or name it by another setting than RESUME with RESET_OPTIMIZER=true"
        yield (f"{start.setting.upper()}={start.named} is at step {start.step}, which leaves no step of "
               f"MAX_STEPS={config.max_steps}; {ways}")


def cautions(config: Config, layers: Sequence[Layer], environ: Mapping, deferred: Iterable) -> Iterator[str]:
    """Yield warnings of settings that are probably not what the user meant."""
    yield from (f"environment: {key} is not a setting; did you mean {guess.upper()}?"
                for key in environ if (guess := misspelled(key)) is not None)
    if 0 < config.max_steps < config.warmup_steps and "warmup_steps" not in deferred:
        yield (f"WARMUP_STEPS={config.warmup_steps} exceeds MAX_STEPS={config.max_steps}, so the rate never "
               "reaches LEARNING_RATE; lower it, for example to 0.1, a share of steps")
    for feature in ("lora", "distillation"):
        yield from without_switch(config, layers, f"{feature}_", f"{feature}_enabled")
    # `.env` serves all stages, but a flag is for this run.
    for stage in filter(config.training_stage.__ne__, KIND_OF_STAGE):
        owned = [name for section in SECTIONS if section.used_if == ("training_stage", stage)
                 for name in section.model_fields]
        if idle := [name.upper() for name in layers[-1].values if name in (*owned, f"{stage}_data_path")]:
            yield (f"command line: TRAINING_STAGE={config.training_stage} ignores settings of {stage}: "
                   f"{', '.join(idle)}; remove these flags, or set that stage")
    if unused := [*dict.fromkeys(name for layer in layers for name in layer.unused)]:
        yield f"Without extensions/, these names are not settings: {', '.join(unused)}"


def without_switch(config: Config, layers: Sequence[Layer], prefix: str, switch: str) -> Iterator[str]:
    """Yield a message if settings have no effect, unless their feature was switched off deliberately."""
    last = {name: index for index, layer in enumerate(layers) for name in layer.values}
    idle = [name for name, value in config if name.startswith(prefix) and value is not None
            and last.get(switch, -1) < last.get(name, -1)]
    if idle and not getattr(config, switch):
        value, where = layers[last[idle[0]]].values[idle[0]]
        yield (f"{where}: {idle[0].upper()}={shortened(str(value))} has no effect without "
               f"{switch.upper()}=true; set that too, or {switch.upper()}=false to train without it")


def without_extension(config: Config, given: Values) -> Iterator[str]:
    """Yield an error for the settings of each extension that EXTENSIONS leaves out.

    A setting counts if it is on, and either the user sets it, or it is fixed and not at its default.
    """
    for extension, names in SETTINGS_OF_EXTENSIONS.items():
        is_idle = extension == "online" and config.training_stage != "grpo"
        if extension in config.extension_names or is_idle or not EXTENSION_SECTIONS:
            continue
        ignored = ["TRAINING_STAGE=grpo"] * (extension == "online")
        for name in names:
            value, (_, where) = getattr(config, name), given.get(name, ("", ""))
            is_own = where and not where.startswith(str(PRESETS_DIR))
            is_fixed, default = on_resume(name) == "fixed", Config.model_fields[name].default
            if value and (value != default if is_fixed else is_own):
                shown = "true" if value is True else shortened(str(value))
                ignored.append(f"{name.upper()}={shown}" + f" ({where})" * bool(where))
        if ignored:
            listed = ",".join([*config.extension_names, extension])
            yield (f"{', '.join(ignored)} need{'s' * (len(ignored) == 1)} {extension} in EXTENSIONS; add it "
                   f"(EXTENSIONS={listed}), or remove {'it' if len(ignored) == 1 else 'them'}")


def launch_problems(config: Config, environ: Mapping[str, str], check: bool) -> Iterator[str]:
    """Yield conflicts between WORLD_SIZE and the launcher that started this process."""
    if "RANK" not in environ:
        if config.world_size > 1 and not check:
            remedy = "unset WORLD_SIZE" if "WORLD_SIZE" in environ else "remove it"
            yield (f"WORLD_SIZE={config.world_size}, but no launcher started this process; use "
                   f"{command('scripts/launch.py', '--nproc-per-node', str(config.world_size))} (or torchrun)"
                   f", or {remedy}")
    elif not all(environ.get(name, "0").isdecimal() for name in ("RANK", "LOCAL_RANK")):
        yield "environment: RANK and LOCAL_RANK must be whole numbers; torchrun sets them"
    elif str(config.world_size) != (started := environ.get("WORLD_SIZE") or "1").strip():
        yield f"WORLD_SIZE={config.world_size}, but the launcher started {started} processes; remove it"
