#!/bin/sh
# Locks itself as a whole: started without the lock, it starts itself anew under it.
#
#   whole-script.sh app.lock [ARGUMENT]...
set -eu

lock=$1

# `check` succeeds only while this lock is held by a withlock above us. A variable alone would be no
# proof: whoever has outlived the hold still has it.
withlock check "$lock" 2>/dev/null || exec withlock -n "$lock" -- "$0" "$@"

shift
echo "alone with $# arguments: $*"
