# Prints what zsh offers for command lines, as "NUMBER<TAB>CANDIDATE" lines.
#
#   zsh -f offers.zsh DIRECTORY PRELUDE LINE...
#
# DIRECTORY holds _withlock. A real interactive zsh in a pseudo-terminal completes; what reaches its
# compadd is noted in a file.
offers=$HOME/offers
zmodload zsh/zpty
zpty shell "TERM=dumb zsh -f -i"
# The answer is computed, so that the echo of what is typed is not taken for it.
run() { zpty -w shell "$1; print ready:\$((1000 + 1))"; zpty -r -m shell seen '*ready:1001*' }
run "PS1= PS2= fpath=(${(q)1} \$fpath); unsetopt zle_bracketed_paste prompt_cr prompt_sp 2>/dev/null"
run "autoload -Uz compinit; compinit -u -D; setopt rm_star_silent"
run "OFFERS=$offers"
run 'compadd() { if (( ${@[1,(i)--]}[(I)-[OAD]*] )); then builtin compadd "$@"; return; fi
  local -a hits; builtin compadd -O hits "$@"; (( $#hits )) && print -rl -- $hits >>$OFFERS; builtin compadd "$@" }'
run 'offer() { _main_complete; print -r -- finished:$((1000 + 2)); compstate[insert]= compstate[list]= }'
run 'zle -C offer complete-word offer; bindkey "^I" offer; bindkey "^U" kill-whole-line'
run "$2"
shift 2
integer number=0
for line; do
  : >$offers
  zpty -n -w shell $'\025'"$line"$'\t'
  zpty -r -m shell seen '*finished:1002*' || exit 1
  sed "s/^/$number\t/" $offers
  number+=1
done
zpty -d shell
rm -f $offers
