"""Lets SGLang import beside a CPU build of torch.

This folder goes on PYTHONPATH of CPU engines only (their spawned schedulers need it too). The
published torchvision is linked against CUDA: beside a CPU torch its extension can't load and the
package dies at import with "operator torchvision::nms does not exist". Declaring the operators'
schemas first lets its pure-Python part import; SGLang needs only torchvision.transforms.
"""

import importlib.abc
import sys


class _DeclareTorchvisionOps(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                library = torch.library.Library("torchvision", "DEF")
                library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                sys._plait_torchvision_library = library  # dropping it would undo the definitions
        return None


sys.meta_path.insert(0, _DeclareTorchvisionOps())
