# fish completion for withlock(1).

set -g __withlock_subcommands inspect break reclaim check acquire renew release reserve
set -g __withlock_valued --also --log-json -w --wait --timeout -E --conflict-exit-code --on-busy --ttl --fence --mode --label --max-hold \
    --kill-after --on-lost --skip-if -c --command --nonce --reason --older-than --for-pid --start \
    --etcd-cacert --etcd-cert --etcd-key --etcd-credentials

# Where the cursor is: `first`, `lock`, `command N` (the command is token N), `text` (after -c TEXT), or a subcommand,
# followed by `named` once its lock has been.
function __withlock_where
    set -l tokens (commandline -opc)
    set -l lock
    set -l dashes
    set -l text
    set -l subcommand
    set -l i 2
    if set -q tokens[2]; and contains -- $tokens[2] $__withlock_subcommands
        set subcommand $tokens[2]
        set i 3
    end
    while set -q tokens[$i]
        set -l token $tokens[$i]
        if test "$token" = --; and not set -q dashes[1]
            set dashes 1
        else if string match -qr -- '^-.' "$token"; and not set -q dashes[1]
            string match -qr -- '^(-c.*|--command(=.*)?)$' "$token"; and set text 1
            if contains -- "$token" $__withlock_valued; or string match -qr -- '^-[^-wEc]+[wEc]$' "$token"
                set i (math $i + 1)
            end
        else if set -q lock[1]; and not set -q text[1]; and not set -q subcommand[1]
            echo command $i
            return
        else
            set lock named
        end
        set i (math $i + 1)
    end
    if set -q subcommand[1]
        echo $subcommand $lock
    else if set -q lock[1]
        set -q text[1]; and echo text; or echo command $i
    else if test (count $tokens) -eq 1
        echo first
    else
        echo lock
    end
end

function __withlock_is
    set -l where (string split ' ' -- (__withlock_where))
    contains -- $where[1] $argv
end

# Options of ours: not once COMMAND has begun.
function __withlock_runs
    set -l where (string split ' ' -- (__withlock_where))
    switch $where[1]
        case first lock text
            return 0
        case command
            test $where[2] -gt (count (commandline -opc)); and not contains -- -- (commandline -opc)
        case '*'
            return 1
    end
end

# A lock is due.
function __withlock_wants_lock
    set -l where (string split ' ' -- (__withlock_where))
    contains -- $where[1] first lock inspect reclaim; and return
    contains -- $where[1] break check acquire renew release; and not set -q where[2]
end

# COMMAND, then its own completion.
function __withlock_command
    set -l where (string split ' ' -- (__withlock_where))
    set -l tokens (commandline -opc)
    set -l current (commandline -ct)
    if test $where[2] -gt (count $tokens)
        complete --do-complete="$current"
    else
        complete --do-complete=(string join ' ' -- (string escape -- $tokens[$where[2]..-1]) "$current")
    end
end

complete -c withlock -f
complete -c withlock -n __withlock_wants_lock -F
complete -c withlock -n '__withlock_is reserve' -xa '(__fish_complete_directories (commandline -ct))'
complete -c withlock -n '__withlock_is command' -xa '(__withlock_command)'
complete -c withlock -n '__withlock_is first' -a inspect -d 'Show who holds a lock'
complete -c withlock -n '__withlock_is first' -a break -d 'End a stale lock'
complete -c withlock -n '__withlock_is first' -a reclaim -d 'Remove old quarantines'
complete -c withlock -n '__withlock_is first' -a check -d 'Do I still hold it?'
complete -c withlock -n '__withlock_is first' -a acquire -d 'Take a lock and exit'
complete -c withlock -n '__withlock_is first' -a renew -d 'Renew an acquired lock'
complete -c withlock -n '__withlock_is first' -a release -d 'Release an acquired lock'
complete -c withlock -n '__withlock_is first' -a reserve -d 'Print the next number'

# A run and acquire.
set -l taking '__withlock_runs; or __withlock_is acquire'
complete -c withlock -n $taking -s n -l no-wait -d 'Try once, do not wait'
complete -c withlock -n $taking -l nonblock -d 'Try once, do not wait'
complete -c withlock -n $taking -l nb -d 'Try once, do not wait'
complete -c withlock -n "$taking; or __withlock_is reserve" -l wait -x -d 'Wait at most so long'
complete -c withlock -n $taking -s w -l timeout -x -d 'Wait at most so long'
complete -c withlock -n $taking -s E -l conflict-exit-code -x -d 'Exit code instead of 75'
complete -c withlock -n $taking -l ttl -x -d 'The lease (60s)'
complete -c withlock -n $taking -l fence -xa '(__fish_complete_directories (commandline -ct))' -d 'Reserve a number'
complete -c withlock -n $taking -l evict-dead -d 'Do not wait for the ttl of a dead holder'
complete -c withlock -n $taking -s p -l parents -d 'Make missing parent directories'
complete -c withlock -n $taking -l mode -x -d 'Permissions of the lock file'
complete -c withlock -n $taking -l label -x -d 'A word for people'
complete -c withlock -n "$taking; or __withlock_is inspect" -s q -l quiet -d 'Say nothing but errors'
complete -c withlock -n $taking -s v -l verbose -d 'Say what is done'

# Whatever may name a lock in etcd.
set -l reaching '__withlock_runs; or __withlock_is inspect break reclaim check acquire renew release'
complete -c withlock -n $reaching -l etcd-cacert -xa '(__fish_complete_suffix .pem | string match -r ".*\.pem.*")' -d 'Whom to trust'
complete -c withlock -n $reaching -l etcd-cert -xa '(__fish_complete_suffix .pem | string match -r ".*\.pem.*")' -d 'Certificate to show'
complete -c withlock -n $reaching -l etcd-key -xa '(__fish_complete_suffix .pem | string match -r ".*\.pem.*")' -d 'Its key'
complete -c withlock -n $reaching -l etcd-credentials -x -d 'File with USER:PASSWORD'

# A run.
complete -c withlock -n __withlock_runs -l also -rF -d 'Hold this lock as well'
complete -c withlock -n __withlock_runs -l log-json -rF -d 'Append events to this file'
complete -c withlock -n __withlock_runs -l on-busy -xa 'fail\t"Exit 75" skip\t"Exit 0" run\t"Run without the lock"' \
    -d 'When the lock is not had'
complete -c withlock -n __withlock_runs -l no-renew -d 'Neither renewal nor guard'
complete -c withlock -n __withlock_runs -l max-hold -x -d 'End COMMAND after this'
complete -c withlock -n __withlock_runs -l kill-after -x -d 'Grace between TERM and KILL (10s)'
complete -c withlock -n __withlock_runs -l on-lost -xa 'terminate\t"End COMMAND" warn\t"Let it go on"' \
    -d 'When the lock is lost'
complete -c withlock -n __withlock_runs -l skip-if -xa '(__fish_complete_command)' -d 'Not needed if this succeeds'
complete -c withlock -n __withlock_runs -s o -l close -d 'COMMAND does not inherit the guard'
complete -c withlock -n __withlock_runs -l reentrant -d 'An ancestor\'s lock counts as taken'
complete -c withlock -n __withlock_runs -s c -l command -xa '(__fish_complete_command)' -d 'Run this through sh -c'
complete -c withlock -n __withlock_runs -s V -l version -d 'Print the version'
complete -c withlock -n '__withlock_runs; or __withlock_is $__withlock_subcommands' -s h -l help -d 'Print help'

# The subcommands.
complete -c withlock -n '__withlock_is inspect reclaim' -l json -d 'Write JSON'
complete -c withlock -n '__withlock_is inspect' -l watch -d 'Redraw every second'
complete -c withlock -n '__withlock_is break' -l force -d 'Also a live lock'
complete -c withlock -n '__withlock_is break check renew release' -l nonce -x -d 'Only the lock with this nonce'
complete -c withlock -n '__withlock_is break' -l keep -d 'Keep the record for good (etcd)'
complete -c withlock -n '__withlock_is break' -l reason -x -d 'Why, for the quarantine'
complete -c withlock -n '__withlock_is break reclaim' -l dry-run -d 'Say what would be done'
complete -c withlock -n '__withlock_is reclaim' -l older-than -x -d 'Only what is older'
complete -c withlock -n '__withlock_is acquire' -l for-pid -xa '(__fish_complete_pids)' -d 'Keep it while this lives'
complete -c withlock -n '__withlock_is acquire' -l export -d 'Print lines for eval'
complete -c withlock -n '__withlock_is reserve' -l start -x -d 'The first number'
