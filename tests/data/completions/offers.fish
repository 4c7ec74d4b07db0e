# Prints what fish offers for command lines, as "NUMBER<TAB>CANDIDATE" lines.
#
#   fish offers.fish COMPLETIONS PRELUDE LINE...
source $argv[1]; or exit 1
eval $argv[2]
set -l number 0
for line in $argv[3..]
    for candidate in (complete --do-complete="$line")
        printf '%d\t%s\n' $number (string split -m 1 \t -- $candidate)[1]
    end
    set number (math $number + 1)
end
