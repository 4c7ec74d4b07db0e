# Prints what bash offers for command lines, as "NUMBER<TAB>CANDIDATE" lines.
#
#   bash offers.bash COMPLETIONS PACKAGE PRELUDE LINE...
#
# PACKAGE is bash-completion's own file, or empty for a bash without it.
[[ $2 ]] && . "$2"
. "$1"
eval "$3"
shift 3
[[ $(complete -p withlock) == *' -F _withlock '* ]] || exit 1

number=0
for line; do
    # The words as readline makes them: an equals sign is one of its own.
    read -ra COMP_WORDS <<<"${line//=/ = }"
    [[ $line == *' ' ]] && COMP_WORDS+=('')
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$line COMP_POINT=${#line}
    COMPREPLY=()
    _withlock withlock "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    for candidate in "${COMPREPLY[@]}"; do
        printf '%d\t%s\n' "$number" "$candidate"
    done
    number=$((number + 1))
done
