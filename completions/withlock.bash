# bash completion for withlock(1). Works with and without the bash-completion package.

# The options of a subcommand; those of a run without one.
_withlock_options() {
    local service='--etcd-cacert --etcd-cert --etcd-key --etcd-credentials'
    local terms='-n --no-wait --nonblock --nb -w --wait --timeout -E --conflict-exit-code
        --ttl --fence --evict-dead -p --parents --mode --label -q --quiet -v --verbose'
    case $1 in
        '') echo "$terms $service --also --log-json --on-busy --no-renew --max-hold --kill-after --on-lost --skip-if -o --close --reentrant
            -c --command -V --version" ;;
        inspect) echo "$service --json --watch -q --quiet" ;;
        break) echo "$service --force --nonce --reason --keep --dry-run" ;;
        reclaim) echo "$service --older-than --dry-run --json" ;;
        check | renew | release) echo "$service --nonce" ;;
        acquire) echo "$terms $service --for-pid --export" ;;
        reserve) echo '--wait --start' ;;
    esac
    echo '-h --help'
}

# What the value of an option is; nothing where it has none.
_withlock_value() {
    case $1 in
        --on-busy) echo 'words fail skip run' ;;
        --on-lost) echo 'words terminate warn' ;;
        --fence) echo directory ;;
        --also | --log-json) echo file ;;
        --etcd-cacert | --etcd-cert | --etcd-key) echo pem ;;
        --etcd-credentials) echo text ;;
        --skip-if | -c | --command) echo command ;;
        --for-pid) echo process ;;
        -w | --wait | --timeout | -E | --conflict-exit-code | --ttl | --mode | --label | --max-hold | --kill-after | \
            --nonce | --reason | --older-than | --start) echo text ;;
    esac
}

# Options with a value may stand at the end of a group: -nw 5s. Prints the one that waits for its value.
_withlock_pending() {
    local word=$1 k
    case $word in
        --*) [[ $(_withlock_value "$word") ]] && printf '%s\n' "$word" ;;
        -*)
            for ((k = 1; k < ${#word}; k++)); do
                if [[ $(_withlock_value "-${word:k:1}") ]]; then
                    ((k == ${#word} - 1)) && printf '%s\n' "-${word:k:1}"
                    return
                fi
            done
            ;;
    esac
}

_withlock_reply() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("$line")
    done < <(compgen "$@")
}

_withlock_files() {
    compopt -o filenames 2>/dev/null
    _withlock_reply "$@"
}

# COMMAND and its arguments, which begin at word $1.
_withlock_command() {
    local cur=${COMP_WORDS[COMP_CWORD]}
    if ((COMP_CWORD == $1)); then
        if [[ $cur == */* ]]; then _withlock_files -f -- "$cur"; else _withlock_reply -c -- "$cur"; fi
    elif declare -F _comp_command_offset >/dev/null; then
        _comp_command_offset "$1"
    elif declare -F _command_offset >/dev/null; then
        _command_offset "$1"
    else
        _withlock_files -f -- "$cur"
    fi
}

_withlock() {
    local subcommands='inspect break reclaim check acquire renew release reserve'
    local cur=${COMP_WORDS[COMP_CWORD]} word i=1 subcommand='' pending='' lock='' dashes='' text=''
    COMPREPLY=()
    if ((COMP_CWORD > 1)) && [[ " $subcommands " == *" ${COMP_WORDS[1]} "* ]]; then
        subcommand=${COMP_WORDS[1]}
        i=2
    fi
    for (( ; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if [[ $pending ]]; then
            # The shell splits --option=value into three words.
            [[ $word == '=' ]] || pending=''
        elif [[ $word == -- && ! $dashes ]]; then
            dashes=1
        elif [[ $word == -?* && ! $dashes ]]; then
            pending=$(_withlock_pending "$word")
            [[ $word == -c* || $word == --command ]] && text=1
        elif [[ ! $subcommand && $lock && ! $text ]]; then
            _withlock_command "$i"
            return
        else
            lock=1
        fi
    done
    if [[ $pending ]]; then
        [[ $cur == '=' ]] && cur=''
        set -- $(_withlock_value "$pending")
        case $1 in
            words) shift && _withlock_reply -W "$*" -- "$cur" ;;
            directory) _withlock_files -d -- "$cur" ;;
            file) _withlock_files -f -- "$cur" ;;
            pem) _withlock_files -f -X '!*.pem' -- "$cur" ;;
            command) _withlock_reply -c -- "$cur" ;;
            process) _withlock_reply -W "$(ps -eo pid= 2>/dev/null) \$\$" -- "$cur" ;;
        esac
    elif [[ $cur == -* && ! $dashes ]]; then
        _withlock_reply -W "$(_withlock_options "$subcommand")" -- "$cur"
    elif [[ $subcommand == reserve ]]; then
        [[ $lock ]] || _withlock_files -d -- "$cur"
    elif [[ $subcommand ]]; then
        [[ $lock && $subcommand != inspect && $subcommand != reclaim ]] || _withlock_files -f -- "$cur"
    elif [[ ! $lock ]]; then
        _withlock_files -f -- "$cur"
        if ((COMP_CWORD == 1)); then
            local files=("${COMPREPLY[@]}")
            _withlock_reply -W "$subcommands" -- "$cur"
            COMPREPLY+=("${files[@]}")
        fi
    elif [[ ! $text ]]; then
        _withlock_command "$COMP_CWORD"
    fi
}

complete -F _withlock withlock
