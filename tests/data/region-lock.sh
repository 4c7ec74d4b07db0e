#!/bin/sh
# Locks a region of itself, rather than one command: a keeper stays behind that renews the lock as long
# as this script lives, and releases it when the script ends, however it ends.
#
#   region-lock.sh app.lock counter
set -eu

lock=$1
counter=$2

nonce=$(withlock acquire --for-pid $$ --wait 30s "$lock")

# The region. It may take as long as it must: nobody gets in while this script lives.
count=$(cat "$counter" 2>/dev/null || echo 0)
echo $((count + 1)) >"$counter.new"
mv "$counter.new" "$counter"

# Early, so that others need not wait for what follows. Exit 76: the lock was lost meanwhile.
withlock release --nonce "$nonce" "$lock"

echo "done: $((count + 1))"
