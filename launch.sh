#!/usr/bin/env bash
# Entropy-aware distributed training: partition, generalise, personalise, report.
#   ./launch.sh [--hosts N] [--out DIR] [flags of partition.py and train_dist.py]     N hosts on this machine
#   ./launch.sh test [flags of pytest]
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
die() { echo "launch.sh: $*" >&2; exit 2; }

# Python and packages: on first use, and whenever requirements.txt has changed.
python=$here/.venv/bin/python
if ! cmp -s "$here/requirements.txt" "$here/.venv/installed"; then
    [ "$(uname -sm)" = "Linux x86_64" ] || die "this needs Linux on x86_64 (for the wheel of dgl 2.1.0), not $(uname -sm)"
    for base in python3 python3.12 python3.11 python3.10 none; do
        "$base" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null && break
    done
    [ "$base" != none ] || die "found no Python 3.10, 3.11 or 3.12 with venv; install one (Debian: python3.11-venv)"
    echo "Installing requirements.txt into .venv with $("$base" --version): 5 GB and some minutes, once." >&2
    "$base" -m venv --clear "$here/.venv"
    "$python" -m pip install -q --disable-pip-version-check -r "$here/requirements.txt"
    cp "$here/requirements.txt" "$here/.venv/installed"
fi
export DGLBACKEND=pytorch EAT_HOME=$here
if [ "${1:-}" = test ]; then shift; cd "$here"; exec "$python" -m pytest "$@"; fi

# All hosts on this machine. One process imports torch and dgl, 7 seconds of work, and forks every server and trainer.
exec "$python" - "$@" <<'PY'
import os, sys
sys.path[0], sys.argv[0] = os.environ["EAT_HOME"], "launch.sh"      # not the folder that this was started in
import argparse, contextlib, ctypes, glob, random, re, signal, socket, time
from pathlib import Path
start = time.time()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:                  # nohup
        signal.signal(number, lambda number, _: sys.exit(128 + number))
parser = argparse.ArgumentParser(prog="./launch.sh", add_help=False, allow_abbrev=False)
parser.add_argument("--hosts", type=int, default=4)
parser.add_argument("--out", type=Path, default="out")
parser.error = lambda message: sys.exit(print(f"launch.sh: {message}", file=sys.stderr) or 2)
launch, flags = parser.parse_known_args()
if launch.hosts < 1:
    parser.error(f"--hosts {launch.hosts} must be at least 1")
for flag in {f.split("=")[0] for f in flags} & {"--num_parts", "--output", "--ip_config", "--part_config", "--graph_name"}:
    parser.error(f"{flag} follows from --hosts and --out here; use these")
threads = max(1, len(os.sched_getaffinity(0)) // max(1, launch.hosts))
os.environ.update(OMP_NUM_THREADS=str(threads), GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", EAT_STARTED=str(start),
                  DGL_DIST_MODE="distributed", DGL_NUM_SERVER="1", DGL_NUM_CLIENT=str(launch.hosts), DGL_GRAPH_FORMAT="csc")
import partition, personalize, train_dist

if {"-h", "--help"} & set(flags):
    for p in (parser, partition.arguments(), train_dist.arguments()):
        p.print_help()
    sys.exit()
out, logs = launch.out, launch.out / "logs"
part, flags = partition.arguments().parse_known_args(flags)
part.num_parts, part.output = launch.hosts, out / "parts"
partition.check(part)
ours = ["logs", "config.json", "metrics.jsonl", "global.pt", "summary.json", "ip_config.txt"]
if taken := [n for n in ours if (out / n).exists() and not (out / "parts/node_map.pt").exists()]:
    parser.error(f"--out {out} holds {taken[0]}, but is of no earlier run; name another directory or remove it")
args = train_dist.check(train_dist.arguments().parse_args([*flags, "--out", str(out), "--seed", str(part.seed)]))

running, ports = {}, []                                     # pid -> name; a port per host and one to meet at


def fork(name, env, main, *arguments):
    """Runs main in a child that dies with this process. stdout stays the screen, stderr, of DGL too, is the log."""
    if pid := os.fork():
        running[pid] = name
        return
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)              # PR_SET_PDEATHSIG
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(env)
    if name.startswith(("train_dist", "personalize")):
        os.dup2(os.open(logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 2)
    try:
        train_dist.guarded(main, *arguments)
    except SystemExit:                                      # how a server ends
        pass
    finally:
        sys.stdout.flush()
        os._exit(0)


def stop():
    """Ends all that runs and removes the shared memory that servers leave."""
    for pid in running:
        os.killpg(pid, signal.SIGKILL)
    while running:
        running.pop(os.wait()[0], None)
    for path in [p for port in ports for p in glob.glob(f"/dev/shm/*.{port}.*")]:
        os.unlink(path)


def servers_end():
    """Whether all servers have ended or do so within 5 seconds, as when all hosts have left them."""
    servers = [pid for pid, name in running.items() if "server" in name]
    for _ in range(50):
        if all(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in servers):
            return True
        time.sleep(0.1)
    return False


def wait():
    """Until all have ended. While there are servers the hosts depend on each other, and the first failure ends the job;
    without them every host personalises for itself."""
    while running:
        pid, status = os.wait()
        name, code = running.pop(pid), os.waitstatus_to_exitcode(status)
        if code:
            if (log := logs / f"{name}.log").exists():
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                print(f"{tail}\nlaunch.sh: {name} failed (exit code {code}), see {log}", file=sys.stderr, flush=True)
            if "host" not in name or not servers_end():
                sys.exit(2 if code == 2 else 1)


def job(script):
    """One DistDGL job: a server and a trainer for each host."""
    ports[:] = []
    while len(ports) <= launch.hosts:                       # below the ports that the kernel gives to clients by itself
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("", port := random.randrange(10000, 32000)))
            if port not in ports:
                ports.append(port)
    args.ip_config = out / "ip_config.txt"
    args.part_config = next(p for p in part.output.glob("*.json") if p.name != "stats.json")
    args.ip_config.write_text("".join(f"127.0.0.1 {port}\n" for port in ports[1:]))
    env = dict(DGL_IP_CONFIG=str(args.ip_config), DGL_CONF_PATH=str(args.part_config), MASTER_PORT=str(ports[0]),
               WORLD_SIZE=str(launch.hosts))

    def role(host):
        train_dist.share_machine(host, ports[1 + host])
        script.main(args)

    for host in range(launch.hosts):
        fork(f"{script.__name__}-server{host}", dict(env, DGL_ROLE="server", DGL_SERVER_ID=str(host)), role, host)
        fork(f"{script.__name__}-host{host}", dict(env, DGL_ROLE="client", RANK=str(host)), role, host)
    wait()
    stop()


try:
    fork("partition", {}, partition.main, part)             # also in a child: a process that has computed must not fork
    import torch._dynamo                                    # for Adam: 4 seconds, here once instead of on each host
    wait()
    logs.mkdir(exist_ok=True)
    for old in out.iterdir():
        if re.fullmatch(r"host\d+\.pt|global\.pt|summary\.json", old.name):
            old.unlink()
    job(train_dist)
    job(personalize)
    sys.exit(3 if personalize.report(out) else 0)
finally:
    stop()
PY
