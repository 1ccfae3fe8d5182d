# Completes the commands of ./paddock, flags, values, presets, runs and checkpoints in bash and zsh: `source scripts/completion.bash` in ~/.bashrc or ~/.zshrc.
# Settings and their values are read from .env.example at each use, and a script's own flags from the script.

if [ -n "${ZSH_VERSION:-}" ]; then
    autoload -U compinit bashcompinit
    command -v compdef > /dev/null || compinit
    bashcompinit
fi

_paddock() {
    local current=${COMP_WORDS[COMP_CWORD]} flag=${COMP_WORDS[COMP_CWORD-1]} before="" script="" root word words=""
    for word in "${COMP_WORDS[@]:1:$((COMP_CWORD-1))}"; do
        case "/$word" in
            */train.py) script=$word root=$(dirname "$word"); break ;;
            */scripts/*.py | */scripts/*.sh) script=$word root=$(dirname "$word")/..; break ;;
        esac
    done
    COMPREPLY=()
    case "/${COMP_WORDS[0]}" in */paddock)
        root=$(dirname "${COMP_WORDS[0]}") word=${COMP_WORDS[1]}
        case "$COMP_CWORD:$word" in
            1:*) words=$(sed -n 's/^\([a-z]*\) .* : .*/\1/p' "$root/scripts/main.py") word=paddock ;;
            2:prepare) words="text chats pairs tokenizer hellaswag sample" ;;
            *:prepare) script=$(sed -n "s/.*\"${COMP_WORDS[2]}\": \"\([a-z_]*\.py\)\".*/\1/p" "$root/scripts/prepare.py") ;;
        esac
        script=$root/scripts/${script:-$(sed -n "s/^$word .* : \([a-z_/]*\.[a-z]*\) .*/\1/p" "$root/scripts/main.py")} ;;
    esac
    [ -n "$words" ] || [ -f "$script" ] && [ -f "$root/.env.example" ] || return 0
    script=${script#./}

    # --flag=value is three words to bash, and one to zsh.
    case "$current" in
        =) current="" ;;
        --*=*) flag=${current%%=*} before=$flag= current=${current#*=} ;;
        *) [ "$flag" != = ] || flag=${COMP_WORDS[COMP_CWORD-2]} ;;
    esac
    case "$words:$current:$flag" in
        [a-z]*) ;;
        :*:--to) words="hf merged gguf hub" ;;
        :-*) words=$(_paddock_flags) ;;
        :*:--preset)
            case "$current" in *,*) before=$before${current%,*}, current=${current##*,} ;; esac
            words=$(cd "$root/plan/presets" && ls) words=${words//.env/} ;;
        :*:--run-name) words=$(ls runs 2> /dev/null) ;;
        :*:--resume) words="auto never $(_paddock_checkpoints)" ;;
        :*:--*-checkpoint | :*:--teacher-model) words=$(_paddock_checkpoints) ;;
        :*:--*) words=$(_paddock_values) ;;
    esac
    case "$words$script" in
        scripts/at_step.py | scripts/diff_runs.py | scripts/without.py | scripts/generate.py | scripts/chat.py | scripts/merge_lora.py | scripts/replay_step.py | scripts/export.py \
            | scripts/report.py | scripts/evaluate.py | scripts/verify_checkpoint.py | scripts/convert_to_gguf.py)
            words=$(_paddock_checkpoints) ;;
    esac
    for word in $words; do
        case "$word" in "$current"*) COMPREPLY+=("$before$word") ;; esac
    done
}

_paddock_flags() {
    local file
    for file in "$script" "$root/data_preparation_utils.py" "$root/extensions/inference/__init__.py" "$root/scripts/launch.py"; do
        case "$file:$script" in "$script":* | *utils.py:*load_* | *utils.py:*run.py | *launch.py:*run.py | *inference/*:*/generate.py | *inference/*:*/chat.py)
            grep -ohE '"--[a-z][a-z-]*"' "$file" | tr -d '"' ;; esac
    done
    case "$script" in *train.py | *run.sh | *run.py) echo --check ;; esac
    case "$script" in
        *train.py | *.sh | *launch.py | *run.py | *pipeline.py | *sweep.py | *decide.py | *load_*.py | *verify_resume.py | *replay_step.py | *evaluate.py)
            echo --config --env-file
            awk '/^#[A-Z]/ && !/^#(HF_TOKEN|WANDB_API_KEY|WANDB_PROJECT)=/ {sub(/=.*/, ""); gsub("_", "-"); print "--" tolower(substr($0, 2))}' "$root/.env.example" ;;
    esac
    echo --help --version
}

# What a setting may be: true and false, or the choices at the end of its meaning.
_paddock_values() {
    awk -v "name=#$(echo "${flag#--}" | tr 'a-z-' 'A-Z_')=" '/^# /{meaning = $0} index($0, name) == 1 {
        if (/=(true|false)$/) print "true false"
        else if (match(meaning, /\([a-z0-9_]+( \| [a-z0-9_]+)+\)$/)) {meaning = substr(meaning, RSTART); gsub(/[(|)]/, " ", meaning); print meaning}
    }' "$root/.env.example"
}

_paddock_checkpoints() {
    local path
    for path in runs/*/ runs/*/checkpoints/step-*/; do
        [ ! -d "$path" ] || echo "${path%/}"
    done
}

# Where nothing of ours fits, the shell completes file names.
complete -o bashdefault -o default -F _paddock python python3 bash torchrun paddock
