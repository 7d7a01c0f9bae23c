#!/bin/sh
# Before a pod ends: its workers end their step, hand over what they have and leave. Waits for them.
set -eu
workers=""
for process in /proc/[0-9]*; do
  [ "$(readlink "$process/ns/net" 2> /dev/null)" = "$(readlink /proc/self/ns/net)" ] || continue
  case "$(readlink "$process/exe" 2> /dev/null)" in *python*) ;; *) continue ;; esac # not the driver's ssh
  if tr '\0' '\n' < "$process/environ" 2> /dev/null | grep -q '^GOSSAMER_ELASTIC_WORKER='; then
    kill -TERM "${process#/proc/}" 2> /dev/null && workers="$workers $process"
  fi
done
for worker in $workers; do
  while [ -d "$worker" ]; do sleep 0.2; done
done
