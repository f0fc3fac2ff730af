#!/usr/bin/env bash
# Makes sure that the sandbox has an engine: uses the Docker Engine that answers, else starts one that is
# installed, else (Debian, root) installs and starts it after saying so. Needs .venv (docker/venv.sh).
# Without any engine: a notice and exit 0 (the `local` backend needs bubblewrap only), or exit 3 if CI=true.
# An engine started here keeps running; its log is ~/.cache/agentft/dockerd.log.
set -euo pipefail
cd "$(dirname "$0")/.."

log="$HOME/.cache/agentft/dockerd.log"
PATH=$PATH:/usr/sbin:/sbin

answers() { .venv/bin/python -c 'import docker; docker.from_env(timeout=5).ping()' 2>/dev/null; }
can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

start_dockerd() {
    command -v dockerd >/dev/null || return 1
    [ "$(id -u)" = 0 ] || return 1
    [ -z "${DOCKER_HOST:-}" ] || return 1
    # A dockerd that was killed leaves its pid file; with that number taken by another process the next one refuses.
    local file
    for file in /var/run/docker.pid /var/run/docker/containerd/containerd.pid; do
        if [ -f "$file" ] && ! grep -qsE 'dockerd|containerd' "/proc/$(cat "$file")/cmdline"; then rm -f "$file"; fi
    done
    echo "engine: starting dockerd in the background (log: $log)"
    mkdir -p "$(dirname "$log")"
    nohup setsid dockerd >"$log" 2>&1 </dev/null &
    local pid=$!
    for _ in $(seq 120); do
        answers && return 0
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.5
    done
    answers && return 0
    echo "engine: dockerd does not answer; the end of its log:" >&2
    tail -n 5 "$log" >&2
    return 1
}

# What is missing and can be had from Debian: bubblewrap is the `local` backend; debootstrap makes the base of the
# sandbox images, and npm fetches the packages of the Node image, where no image registry is reachable.
missing=()
answers || command -v dockerd >/dev/null || missing+=(docker.io)
command -v debootstrap >/dev/null || missing+=(debootstrap)
command -v bwrap >/dev/null || missing+=(bubblewrap)
if [ "${CI:-}" = true ]; then  # tests of several hosts and of Podman must not be skipped there
    command -v ip >/dev/null || missing+=(iproute2)
    command -v podman >/dev/null || missing+=(podman)
    command -v newuidmap >/dev/null || missing+=(uidmap)
fi
command -v npm >/dev/null || missing+=(npm)
if [ ${#missing[@]} -gt 0 ] && can_install; then
    echo "engine: installing ${missing[*]} with apt-get"
    if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
           apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >/dev/null; then
        echo "engine: apt-get could not install ${missing[*]}" >&2
    fi
fi

if answers || start_dockerd; then
    echo "engine: Docker Engine answers"
    exit 0
fi
if [ "${CI:-}" = true ]; then
    echo "engine: no Docker Engine, and CI=true needs one" >&2
    exit 3
fi
if command -v bwrap >/dev/null; then
    echo "engine: NO Docker Engine; the demo runs on the local bubblewrap backend, tests that need an engine skip"
else
    echo "engine: NO Docker Engine and no bubblewrap; install one of them (apt-get install docker.io bubblewrap)"
fi
