"""Flags of `gossamer run` that horovodrun has too: their effects and refusals; hosts and slots. No workers."""

import os
import re
import sys

import pytest

from gossamer.errors import ConfigError
from gossamer.launch import cli, function, horovod_flags, hosts, outcome, run, ssh


def parsed(*arguments: str, command: tuple[str, ...] = ("train.py",)):
    return run.build_parser("gossamer run").parse_args([*arguments, *command])


def variables(*arguments: str) -> dict[str, str]:
    """The variables that the flags add to the environment of the workers."""
    with function._unchanged():
        before = dict(os.environ)
        run.prepare(parsed(*arguments))
        return {name: value for name, value in os.environ.items() if before.get(name) != value}


def test_flags_of_horovodrun_set_the_variables_of_the_workers(capsys) -> None:
    numbers = "--fusion-threshold-mb 64 --cycle-time-ms 2.5 --cache-capacity 0 --start-timeout 7 --num-nccl-streams 2"
    assert variables(*numbers.split()) == {
        "HOROVOD_FUSION_THRESHOLD": str(64 << 20),
        "HOROVOD_CYCLE_TIME": "2.5",
        "HOROVOD_CACHE_CAPACITY": "0",
        "HOROVOD_START_TIMEOUT": "7",
        "HOROVOD_NUM_NCCL_STREAMS": "2",
    }
    told = capsys.readouterr().err.splitlines()
    assert [line.split(":")[2].strip() for line in told] == ["--cycle-time-ms", "--num-nccl-streams"]
    assert told[0].startswith("gossamer run: no effect: --cycle-time-ms: nothing runs by a cycle")
    timeline = "--timeline-filename t.json --timeline-mark-cycles --no-stall-check --log-level DEBUG"
    assert variables(*timeline.split()) == {
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_LOG_LEVEL": "DEBUG",
    }
    checks = "--stall-check --stall-check-warning-time-seconds 9 --stall-check-shutdown-time-seconds 12"
    assert variables(*checks.split(), "--log-without-timestamp", "--no-hierarchical-allreduce") == {
        "HOROVOD_STALL_CHECK_DISABLE": "0",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "9",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "12",
        "HOROVOD_LOG_HIDE_TIME": "1",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
    }
    assert variables("--gloo", "--disable-cache", "--tcp", "-x", "A=b=c", "--nics", "eth0,eth1") == {
        "NCCL_IB_DISABLE": "1",
        "A": "b=c",
        "GLOO_SOCKET_IFNAME": "eth0,eth1",
        "NCCL_SOCKET_IFNAME": "eth0,eth1",
        "HOROVOD_GLOO_IFACE": "eth0",
    }
    assert variables("--timeline", "t.json") == {"GOSSAMER_TIMELINE": os.path.abspath("t.json")}
    assert variables() == {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mpi", "--mpi is not supported; start the script with `mpirun"),
        ("--jsrun", "--jsrun is not supported"),
        ("--mpi-args=-x", "--mpi-args is not supported"),
        ("--binding-args=-x", "--binding-args is not supported; use --numa-binding"),
        ("--fusion-threshold-mb=-1", "--fusion-threshold-mb must be at least 0, got -1"),
        (
            "-x NOT_SET_ANYWHERE",
            "-x needs NAME=VALUE, or the name of a variable that is set, got 'NOT_SET_ANYWHERE'",
        ),
        ("--config-file nowhere.yaml", "--config-file nowhere.yaml: .*No such file"),
        ("--as-horovod --no-python", "--as-horovod needs a Python script or -m MODULE"),
        ("--as-bagua --no-python", "--as-bagua needs a Python script or -m MODULE"),
    ],
)
def test_flags_that_cannot_be_met_are_refused(flags, message) -> None:
    with pytest.raises(ConfigError, match=message):
        variables(*flags.split())


def test_a_configuration_file_fills_in_what_the_command_line_leaves_open(tmp_path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "config.yaml"
    file.write_text(
        "num-proc: 3\ncontroller: gloo\nparams:\n  fusion_threshold_mb: 32\n  cycle-time-ms: 4\n"
        "stall_check:\n  enabled: false\ntimeline:\n  filename: t.json\n  mark_cycles: true\nlogging:\n  level: INFO\n"
    )
    assert variables("--cycle-time-ms", "1", "--config-file", str(file)) == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_CYCLE_TIME": "1.0",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_LOG_LEVEL": "INFO",
    }
    for text, message in (
        ("params: {fusion: 1}", "params: fusion is not known"),
        ("params: {cycle_time_ms: fast}", "cycle_time_ms must be of type float, got 'fast'"),
        ("stall_check: {enabled: 3}", "stall_check must be true or false, got 3"),
        ("controller: mpi", "controller must be gloo, got 'mpi'"),
        ("- 1", "must hold keys and values, got list"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            variables("--config-file", str(file))


def test_a_configuration_file_without_pyyaml_says_so(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="--config-file needs PyYAML .*pip install pyyaml"):
        variables("--config-file", "x.yaml")


def test_hosts_and_hostfiles_are_read_and_filled_in_their_order(tmp_path) -> None:
    assert hosts.parse_hosts("a:2, me@b:1,[fe80::1]:3,c") == [
        hosts.Host("a", 2),
        hosts.Host("me@b", 1),
        hosts.Host("fe80::1", 3),
        hosts.Host("c", 1),
    ]
    file = tmp_path / "hosts"
    file.write_text("# of the lab\na slots=2\n\nb slots = 1  # small\nc:4\n")
    found = hosts.read_hostfile(str(file))
    assert found == [hosts.Host("a", 2), hosts.Host("b", 1), hosts.Host("c", 4)]
    assert hosts.fill(found, 3) == [hosts.Host("a", 2), hosts.Host("b", 1)]
    assert hosts.fill(found, None) == found
    assert hosts.chosen(parsed("-np", "4", "--hostfile", str(file)))[-1] == hosts.Host("c", 1)
    assert hosts.Host("localhost", 1).is_local()
    assert hosts.Host("root@127.0.0.1", 1).is_local()
    assert not hosts.Host("192.0.2.1", 1).is_local()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-H", "a:2,b:2", "-np", "5"], "-np must be from 1 to the 4 slots of a:2, b:2, got 5"),
        (["-H", "a:2,a:2"], "a host is named once, with all its slots; got a several times"),
        (["-H", "a:two"], "a host is written HOST:SLOTS, got 'a:two'"),
        (["-H", "-oProxyCommand=x:1"], "a host is written HOST:SLOTS, got '-oProxyCommand=x:1'"),
        (["-H", ","], "-H names no host"),
        (["-H", "a:1", "--hostfile", "f"], "-H and --hostfile exclude each other"),
        (["-H", "a:1", "--nnodes", "2"], "-H and --hostfile do not go with --nnodes, got '2'"),
        (
            ["-H", "a:2", "--nproc-per-node", "2"],
            "do not go with --nproc-per-node, got '2'; -np is the number",
        ),
        (["--hostfile", "nowhere"], "--hostfile nowhere: No such file"),
    ],
)
def test_hosts_that_cannot_be_are_refused(flags, message) -> None:
    flags = [f"-H{flags[1]}", *flags[2:]] if flags[0] == "-H" else flags
    with pytest.raises(ConfigError, match=re.escape(message)):
        hosts.chosen(parsed(*flags))


def test_a_command_may_begin_with_python_and_a_program_is_recognised() -> None:
    for command, module, script in (
        (("python", "-u", "train.py", "-x"), False, "train.py"),
        (("python3", "-m", "package", "-x"), True, "package"),
        ((sys.executable, "train.py", "-x"), False, "train.py"),
    ):
        args = parsed("-np", "1", command=command)
        run.prepare(args)
        assert (args.module, args.training_script, args.training_script_args) == (module, script, ["-x"])
    for command, message in (
        (("python", "-O", "train.py"), "starts scripts and modules by itself, got python -O train.py"),
        (("bash", "train.sh"), "bash is a program; set --no-python to run it"),
    ):
        with pytest.raises(ConfigError, match=message):
            run.prepare(parsed(command=command))


def test_check_build_version_and_help_say_what_there_is(capsys) -> None:
    for flag, words in (
        ("--check-build", ["[X] PyTorch", "[ ] TensorFlow", "[X] Gloo"]),
        ("--version", ["gossamer "]),
        ("--help", ["-H localhost:4,other:2", "--fusion-threshold-mb", "HOROVOD_TIMELINE", "--ssh-port"]),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(["run", flag])
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        assert [word for word in words if word not in shown] == []
    assert {knob.variable for knob in horovod_flags.KNOBS} <= known_variables()


def known_variables() -> set[str]:
    from gossamer.horovod.common import environment

    return {*environment.EFFECTIVE, *environment.WITHOUT_EFFECT, *environment.ELSEWHERE}


def test_start_timeout_must_be_a_number_of_seconds(monkeypatch) -> None:
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="HOROVOD_START_TIMEOUT must be at least 1 second, got 'soon'"):
        ssh.start_timeout()


def test_the_first_failure_is_found_among_those_of_all_hosts(capsys) -> None:
    late = outcome.Failure(rank=0, exit_code=1, at_ns=9e9, trace="Lost: connection", told=True)
    first = outcome.Failure(rank=3, exit_code=-9, at_ns=8e9, trace="", told=False)
    everything = outcome.Outcome.from_json(outcome.Outcome([late, first]).to_json())
    assert outcome.report(everything) == 137
    assert capsys.readouterr().err == (
        "gossamer run: rank 3 was killed by signal 9 (SIGKILL) (then rank 0 ended too)\n"
    )
