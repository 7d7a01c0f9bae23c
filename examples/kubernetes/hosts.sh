#!/bin/sh
# Prints the pods of job.yaml that are there, with the number of workers that each takes.
pod=0
while [ "$pod" -lt "$PODS" ]; do
  name="train-$pod.train"
  if getent hosts "$name" > /dev/null; then echo "$name:$WORKERS_EACH"; fi
  pod=$((pod + 1))
done
