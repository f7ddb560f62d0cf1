"""Slurm: what this cluster allows, and what the job around this process has asked for."""

import re
import shutil
from collections.abc import Mapping

from hybrid.doctor.finding import Finding, said
from hybrid.ranks.slurm import SIGNAL_SECONDS


def slurm(environment: Mapping[str, str]) -> list[Finding]:
    """The cluster's side, and inside a job the job's."""
    if shutil.which("sbatch") is None or shutil.which("scontrol") is None:
        inside = "SLURM_JOB_ID" in environment
        remedy = "put Slurm's commands on PATH, or the job cannot requeue itself" if inside else ""
        return [Finding("Slurm", "no sbatch and scontrol here", remedy)]
    version = (said("sbatch", "--version") or "installed, of unknown version").strip()
    configuration = said("scontrol", "show", "config")
    if configuration is None:
        remedy = "hybrid submit needs it: run on a login node, or ask the site if that is no help"
        return [Finding("Slurm", f"{version}; its controller does not answer", remedy)]
    settings = dict(re.findall(r"^(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", configuration, re.MULTILINE))
    requeue, pmix = Finding("requeue", "allowed"), Finding("PMIx", "srun has none: use mpirun")
    if settings.get("JobRequeue", "1") != "1":
        remedy = (
            "if jobs with --requeue are not requeued either: --max-requeues 0 and a chain of jobs"
        )
        requeue = Finding("requeue", "not the default (JobRequeue=0); scripts ask for it", remedy)
    if kinds := re.findall(r"\bpmix(?:_v\d+)?\b", said("srun", "--mpi=list") or ""):
        listed = ", ".join(sorted(set(kinds) - {"pmix"})) or "pmix"
        trial = "srun --mpi=pmix -n 2 hybrid doctor shows if it works"
        pmix = Finding("PMIx", f"{listed} listed; {trial}")
    return [Finding("Slurm", version), requeue, preemption(settings), pmix, *job(environment)]


def preemption(settings: Mapping[str, str]) -> Finding:
    """The signal that a job gets before an urgent one takes its nodes."""
    mode = settings.get("PreemptMode", "OFF")
    if "preempt/none" in settings.get("PreemptType", "preempt/none") or mode == "OFF":
        return Finding("preemption", "none")
    if "preempt_send_user_signal" in settings.get("SlurmctldParameters", ""):
        return Finding("preemption", f"{mode}, after the signal that the job asks for")
    text = f"{mode}, announced by SIGTERM if at all, which ends mpirun's daemons at once"
    remedy = "--launcher srun, or ask for SlurmctldParameters=preempt_send_user_signal"
    return Finding("preemption", text, remedy)


def job(environment: Mapping[str, str]) -> list[Finding]:
    """Time left, the signal before the end and the right to be requeued, inside a job."""
    number = environment.get("SLURM_JOB_ID")
    if not number:
        return []
    left = (said("squeue", "--noheader", "--jobs", number, "--format=%L") or "unknown").strip()
    found = [Finding("time left", f"{left} of job {number}")]
    batch = said("scontrol", "write", "batch_script", number, "-")
    if batch is None or "#!" not in batch:
        return [
            *found,
            Finding("signal", "no batch script: no signal before the end"),
        ]
    found.append(signal(batch))
    shown = said("scontrol", "show", "job", number) or ""
    if "Requeue=0" in shown:
        remedy = "#SBATCH --requeue in the job script"
        found.append(Finding("requeue", f"job {number} forbids it", remedy))
    return found


def signal(script: str) -> Finding:
    """The signal that the batch script asks for."""
    asked = re.search(r"^#SBATCH\s+(?:--signal[= ]|-s\s*)(\S+)", script, re.MULTILINE)
    remedy = f"#SBATCH --signal=B:USR1@{SIGNAL_SECONDS} and a trap, as hybrid submit writes"
    if asked is None:
        return Finding(
            "signal", "none asked for: the last steps are lost at the time limit", remedy
        )
    known = re.fullmatch(r"(?:[BR]*:)?(?:SIG)?(?:USR1|USR2|10|12)(?:@\d+)?", asked[1])
    return Finding("signal", f"{asked[1]} before the time limit", "" if known else remedy)
