"""nn.Linear whose products have aligned sizes while it trains; in evaluation (export, counting) it is nn.Linear.

Matrix kernels read rows in whole vectors. Rows of 588, 2,687 or 487 numbers take slower ones: on an AVX2 CPU (fp32) the three
products of 588 -> 2,687 run at 0.64, of 487 -> 1,948 at 0.69 of the rate of the next multiples of 8; tensor cores want 16 bytes,
8 bf16 numbers (not yet run on CUDA). So zeros fill weights, biases and inputs up to a multiple of 8, inside the computation alone:
parameters and state_dict are as without, results are but for rounding. A hidden layer hands its zeros on (`hidden_linear`):
act(0) = 0 for every activation that a spec can name, and the next weight has zero columns there.

The weights are padded in the layer's own forward, not its parent's: ZeRO 3 gathers them for just that long.
"""

from torch import Tensor, nn
from torch.nn.functional import linear, pad

SMALLEST = 64
"""Below it a product is too small for it to matter."""


def aligned(size: int) -> int:
    """What `size` is filled up to."""
    return -(-size // 8) * 8 if size >= SMALLEST else size


class Linear(nn.Linear):
    hands_zeros_on = False

    def forward(self, x: Tensor) -> Tensor:
        given = x.shape[-1]
        inputs, outputs = aligned(self.in_features), aligned(self.out_features)
        needs_zeros = self.training and (inputs, outputs) != (self.in_features, self.out_features)
        if given == self.in_features and not needs_zeros:
            return super().forward(x)
        if given not in (self.in_features, inputs):  # filled up or cut off, a picture of another size would pass
            return super().forward(x)
        if given != inputs:
            x = pad(x, (0, inputs - given))
        weight = pad(self.weight, (0, inputs - self.in_features, 0, outputs - self.out_features))
        bias = None if self.bias is None else pad(self.bias, (0, outputs - self.out_features))
        y = linear(x, weight, bias)
        return y if self.hands_zeros_on else y[..., : self.out_features]


def hidden_linear(num_inputs: int, num_outputs: int) -> Linear:
    """For a layer whose output goes through an activation into another `Linear` and nowhere else."""
    layer = Linear(num_inputs, num_outputs)
    layer.hands_zeros_on = True
    return layer
