#!/bin/sh
# Prints the access token and succeeds if it is good for a while yet; else fails.
#
#   withlock -w 30s --skip-if 'token-if-good.sh credentials' token.lock -- \
#       token-refresh.sh credentials http://127.0.0.1:8080/token
#
# Asked under the lock, so that of all who came with the same stale token the first refreshes it, and
# the others, when their turn comes, find that there is nothing left to do.
set -eu

field() {
    sed -n "s/.*\"$1\": *\"\{0,1\}\([^\",}]*\).*/\1/p" "$2"
}

[ "$(date +%s)" -lt "$(field expires_at "$1")" ]
field access_token "$1"
