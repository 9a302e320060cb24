# SPDX-License-Identifier: Apache-2.0
"""Stands in for sglang-kernel, which imports nothing without a GPU: every name is there, none can be called. SGLang's
own PyTorch code computes on the CPU."""
import importlib.abc, importlib.machinery, sys, types


class Missing:
    def __init__(self, name):
        self.name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.name}.{name}")

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self.name} is a stub")


class Module(types.ModuleType):
    __path__, __getattr__ = [], lambda self, name: getattr(Missing(self.__name__), name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())
sys.modules[__name__].__class__ = Module
