# SPDX-License-Identifier: Apache-2.0
"""One rival in a process of its own: worker.py JOB, a JSON object. Commands come as lines of JSON, answers go to the descriptor that was standard
output; what libraries print goes to standard error."""
import importlib, json, os, sys, types

from layer import draw_tokens, shape_of
from timing import timed


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**what):
        print(json.dumps(what), file=answers, flush=True)

    job = types.SimpleNamespace(**json.loads(sys.argv[1]))
    job.shape = shape_of(job.shape)
    job.x, job.ids, job.scales = draw_tokens(job.shape, job.tokens)
    try:
        module = importlib.import_module(job.module)
        rival = getattr(module, job.rival)(job)
    except Exception as error:
        return tell(missing=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no more is known'}")
    tell(what=rival.what)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            passes = rival.passes(command["tokens"])
            if "result" in command:
                passes()
                rival.result(command["tokens"]).tofile(command["result"])  # float32 [T,H]
                tell(done=True)
            else:
                tell(ms=timed(passes))
        except Exception as error:
            tell(missing=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")


if __name__ == "__main__":
    main()
