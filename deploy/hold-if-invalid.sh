#!/bin/sh
# Runs a command, here `millrace ...`, for a container that is always restarted.
#
# Exit status 2 means that an option or the model is invalid, so that another start would end the same way. A restart policy
# does not know exit statuses: instead of ending, the container then waits until it is stopped. Any other status is passed on.
child='' is_stopped=''
trap 'is_stopped=yes; [ -z "$child" ] || kill -TERM "$child"' TERM INT # before the start: a container may be stopped at once
"$@" &
child=$!
[ -z "$is_stopped" ] || kill -TERM "$child"
wait "$child"
status=$?
while kill -0 "$child" 2>/dev/null; do # a signal has ended the wait, and not the command
  wait "$child"
  status=$?
done
[ "$status" -eq 2 ] || exit "$status"
sleep infinity &
trap 'kill $!; exit "$status"' TERM INT # a signal without a handler does not end the first process of a container
[ -z "$is_stopped" ] || kill -TERM $$
echo "exit status 2: this container waits to be stopped; correct its command, then run \`docker compose up\` again" >&2
wait
