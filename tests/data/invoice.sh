#!/bin/sh
# Files an invoice under a number of its own, with or without the lock.
#
#   withlock --wait 2s --on-busy run invoices.lock -- invoice.sh invoices <invoice.txt
#
# It must never wait for long, so it is run without the lock when another has it (WITHLOCK_MODE is
# "degraded" then). What both modes share is handed out by `reserve`, which never gives a number twice.
# What is not protected by that, the list of all, is only touched by whoever has the lock.
set -eu

dir=$1

number=$(withlock reserve --wait 0 "$dir/numbers")
cat >"$dir/invoice-$number"

if [ "$WITHLOCK_MODE" = locked ]; then
    for invoice in "$dir"/invoice-*; do
        echo "${invoice##*/}"
    done >"$dir/list.new"
    mv "$dir/list.new" "$dir/list"
fi
echo "$number"
