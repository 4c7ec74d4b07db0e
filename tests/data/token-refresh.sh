#!/bin/sh
# Prints an access token that is good now. Refreshes it when it is due.
#
#   withlock -w 30s token.lock -- token-refresh.sh credentials http://127.0.0.1:8080/token
#
# The provider takes each refresh token once, and revokes everything when one comes a second time. So
# only one copy may be between "read the credentials" and "commit the new ones": that is what the lock
# is for.
set -eu

credentials=$1
endpoint=$2

field() {
    sed -n "s/.*\"$1\": *\"\{0,1\}\([^\",}]*\).*/\1/p" "$2"
}

now=$(date +%s)
if [ "$now" -ge "$(field expires_at "$credentials")" ]; then
    answer=$(mktemp "$credentials.XXXXXX")
    trap 'rm -f "$answer"' EXIT
    refresh_token=$(field refresh_token "$credentials")
    # Standard input, not an argument: the process list is not a place for secrets.
    printf 'grant_type=refresh_token&refresh_token=%s' "$refresh_token" |
        curl --silent --show-error --fail --max-time 20 --data @- --output "$answer" "$endpoint"
    new_access=$(field access_token "$answer")
    new_refresh=$(field refresh_token "$answer")
    expires_at=$(($(date +%s) + $(field expires_in "$answer")))
    printf '{"access_token": "%s", "refresh_token": "%s", "expires_at": %s}\n' \
        "$new_access" "$new_refresh" "$expires_at" >"$answer"
    # Still ours? A copy that was stopped for long enough has been taken for dead, and must not write.
    if [ -n "${WITHLOCK_NONCE-}" ]; then
        withlock check
    fi
    # The commit: a reader sees the old credentials or the new ones, never half of them.
    mv "$answer" "$credentials"
fi
field access_token "$credentials"
