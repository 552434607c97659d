"""Runs of train.py for tests: one process imports everything once, and forks for each run.

Reads jobs as lines of JSON from stdin, answers each with a line of JSON. Keys of a job:

    argv        options of train.py
    processes   how many (gloo on the CPU); 1 if absent
    launch      Accelerate config file whose settings are put in the environment, as `accelerate launch` does
    patch       Python code to execute in each process before the run
    kill        kill the run with SIGKILL as soon as this file exists
"""

import json
import os
import signal
import socket
import sys
import tempfile
import time

import accelerate.commands.launch as launcher
import common
import train
from accelerate.state import DistributedType, PartialState
from accelerate.utils.launch import prepare_multi_gpu_env


def environment(file: str) -> dict[str, str]:
    """What `accelerate launch --config_file` sets for the processes it starts."""
    args = launcher.launch_command_parser().parse_args(["--config_file", file, "train.py"])
    args, _, _ = launcher._validate_launch_command(args)
    return prepare_multi_gpu_env(args)


def start(job: dict, rank: int, port: int, output: str) -> int:
    """Fork a process of a run; returns its id."""
    if pid := os.fork():
        return pid
    status = 70
    try:
        for stream in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
        processes = job.get("processes", 1)
        os.environ.pop("ACCELERATE_USE_CPU", None)
        if job.get("launch"):
            os.environ.update(environment(job["launch"]))
            # Accelerate knows FSDP on accelerators only: it is told that this is one.
            os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
            PartialState._prepare_backend = lambda *args: ("gloo", DistributedType.MULTI_GPU)
        else:
            os.environ["ACCELERATE_USE_CPU"] = "true"
        if processes > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1"}
        exec(job.get("patch", ""), {"rank": rank})
        sys.argv = ["train.py", *job["argv"]]
        common.run(train.main)
        status = 0
    except SystemExit as error:
        status = error.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve(job: dict) -> dict:
    """Run a job; gives each process's exit status (negative: the signal that ended it) and what they printed."""
    with socket.socket() as free, tempfile.NamedTemporaryFile("r") as output:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        pids = [start(job, rank, port, output.name) for rank in range(job.get("processes", 1))]
        statuses: dict[int, int] = {}
        deadline = time.monotonic() + job.get("timeout", 120)
        while len(statuses) < len(pids):
            for pid in set(pids) - set(statuses):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
            if os.path.exists(job.get("kill", "")) or time.monotonic() > deadline:
                for pid in set(pids) - set(statuses):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        return {"statuses": [statuses[pid] for pid in pids], "output": output.read()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)
