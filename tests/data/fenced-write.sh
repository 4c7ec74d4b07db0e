#!/bin/sh
# Writes standard input to a file, unless somebody with a larger token has written to it.
#
#   withlock --fence tokens job.lock -- sh -c 'make-report | fenced-write.sh report'
#
# A holder that was suspended on another host for longer than its ttl has lost the lock and does not
# know it yet. Its token is smaller than its successor's, so what it still writes is refused here, where
# it would do harm: exit 1, and the file stays as it is.
set -eu

file=$1
token=$WITHLOCK_FENCE

new=$(mktemp "$file.XXXXXX")
trap 'rm -f "$new"' EXIT
cat >"$new"

# To compare and to write must be one step. This lock is the file's own, held for a moment by whoever
# writes; the long one of the job is not what protects the file.
export file token new
withlock -q "$file.write-lock" -- sh -c '
    seen=$(cat "$file.token" 2>/dev/null || echo 0)
    if [ "$token" -lt "$seen" ]; then
        echo "refused: token $token, but $seen has written already" >&2
        exit 1
    fi
    echo "$token" >"$file.token.new"
    mv "$file.token.new" "$file.token"
    mv "$new" "$file"
'
