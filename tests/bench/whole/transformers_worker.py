# SPDX-License-Identifier: Apache-2.0
"""A model of transformers in a process of its own, its experts on a service or, where they fit, here: transformers_worker.py JOB. Answers go as those of
rivals/worker.py do. A command {"prompts": [[id, ..], ..], "new": N} generates N tokens behind each of equally long prompts, the likeliest ones; the answer
has when they were there, the tokens, and how many seconds layers of experts had taken at each step's end."""
import json, os, sys, time, types

import model as whole


class Engine:
    def __init__(self, job):
        import torch, transformers

        torch.cuda.is_current_stream_capturing = lambda: False  # the environment has empty CUDA libraries, which end the program here
        torch.set_num_threads(job.threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.torch, self.job, self.experts_seconds = torch, job, 0.0
        self.model = self.quantised((self.load_served if job.url else self.load_whole)(f"{job.folder}/transformers").eval())
        self.what = f"transformers {transformers.__version__}, torch {torch.__version__}, {job.dense}"
        if job.url:
            self.what += f", numerics {self.model.expertd.client.models()[0].numerics}"
        for layer in self.model.model.layers:
            layer.mlp.experts.register_forward_pre_hook(self.before)
            layer.mlp.experts.register_forward_hook(self.after)

    def load_served(self, path):
        import expertd.hf

        dtype = self.torch.float32 if self.job.dense == "float32" else self.torch.bfloat16  # as the file has them, until they are quantised
        return expertd.hf.from_pretrained(path, self.job.url, progress=False, dtype=dtype)

    def quantised(self, model):
        """With weights of linear layers that FBGEMM has packed, if that is asked for; all else is then in float32."""
        ao = self.torch.ao.quantization
        kind = {"float16": ao.float16_dynamic_qconfig, "int8": ao.per_channel_dynamic_qconfig}.get(self.job.dense)
        return model if kind is None else ao.quantize_dynamic(model, {self.torch.nn.Linear: kind}, inplace=True).float()

    def load_whole(self, path):
        """The experts' 4 bits widened, as transformers computes with none."""
        import transformers

        shape, torch, kind = whole.Model(**self.job.model), self.torch, transformers.Qwen3MoeForCausalLM
        plain = kind._init_weights
        kind._init_weights = lambda model, part: None if "Experts" in type(part).__name__ else plain(model, part)  # no random values before their own
        dtype = torch.bfloat16 if self.job.dense == "bfloat16" else torch.float32
        found = kind.from_pretrained(path, dtype=dtype, experts_implementation="grouped_mm")
        for n, layer in enumerate(found.model.layers):
            gate, up, down = (torch.from_numpy(whole.widen_experts(self.job.folder, shape, n, matrix)) for matrix in ("gate", "up", "down"))
            layer.mlp.experts.gate_up_proj.data.copy_(torch.cat((gate, up), 1))
            layer.mlp.experts.down_proj.data.copy_(down)
        return found

    def before(self, *_):
        self.begin = time.monotonic()

    def after(self, *_):
        self.experts_seconds += time.monotonic() - self.begin

    def generate(self, prompts, new):
        ids, stamps, experts, self.experts_seconds = self.torch.tensor(prompts), [], [], 0.0

        def see(ids, scores, **_):  # of transformers' stopping criteria: sees each step's end, and never stops
            stamps.append(time.monotonic())
            experts.append(self.experts_seconds)
            return self.torch.zeros(ids.shape[0], dtype=self.torch.bool)

        with self.torch.inference_mode():
            found = self.model.generate(ids, attention_mask=self.torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0,
                                        stopping_criteria=[see])
        return dict(stamps=[stamps] * len(prompts), tokens=found[:, ids.shape[1] :].tolist(), experts=experts)

    def profile(self, prompts, new):
        """What operations take, as PyTorch tells it."""
        with self.torch.profiler.profile(activities=[self.torch.profiler.ProfilerActivity.CPU]) as profile:
            answer = self.generate(prompts, new)
        return dict(answer, profile=profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**what):
        print(json.dumps(what), file=answers, flush=True)

    def attempt(function):
        try:
            return function()
        except Exception as error:
            tell(missing=f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no more is known'])[0]}")

    job = types.SimpleNamespace(**json.loads(sys.argv[1]))
    engine = attempt(lambda: Engine(job))
    if engine is None:
        return
    tell(what=engine.what)
    for line in sys.stdin:
        command = json.loads(line)
        run = engine.profile if command.pop("profile", False) else engine.generate
        answer = attempt(lambda: run(**command))
        if answer is not None:
            tell(**answer)


if __name__ == "__main__":
    main()
