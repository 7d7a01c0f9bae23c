#!/bin/sh
# What each pod of job.yaml runs. Pod 0 drives the run, and starts workers in all pods over ssh.
#
# pod.sh TRAINING-SCRIPT [ARGUMENTS]
set -eu
scripts=$(cd "$(dirname "$0")" && pwd)
: "${KEYS:=/keys}" "${PORT:=2222}" "${MIN_WORKERS:=1}"
own=$(mktemp -d)

# The key of the run is a secret of the cluster, and each pod makes a host key of its own.
ssh-keygen -q -t ed25519 -N "" -f "$own/host_key"
mkdir -p /run/sshd
sshd="$(command -v sshd || echo /usr/sbin/sshd) -D -e -f /dev/null -p $PORT -h $own/host_key"
sshd="$sshd -o AuthorizedKeysFile=$KEYS/id.pub -o StrictModes=no -o PasswordAuthentication=no -o PidFile=none"
[ "$JOB_COMPLETION_INDEX" = 0 ] || exec $sshd

# A pod that is made anew has the name of the one before, and another host key.
cat > "$own/config" <<END
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
END
printf '#!/bin/sh\nexec %s -F %s "$@"\n' "$(command -v ssh)" "$own/config" > "$own/ssh"
chmod +x "$own/ssh"
export PATH="$own:$PATH"

# --grace is below terminationGracePeriodSeconds of job.yaml. A shell runs the discovery command, so it is quoted.
exec gossamer run --min-np "$MIN_WORKERS" --grace 50 --blacklist-cooldown-range 10 300 \
  --host-discovery-script "'$scripts/hosts.sh'" -p "$PORT" -i "$KEYS/id" "$@"
