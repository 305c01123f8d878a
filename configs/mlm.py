"""A bidirectional encoder trained by masked language modelling, static and grown.

    python launch.py train --config=configs/mlm.py --workdir=runs/mlm

The quick start's size and text; 15% of the positions hidden, 80/10/10. Nothing about growth depends on the
objective or on the direction of attention.
"""

from configs import quickstart


def get_config():
    config = quickstart.get_config()
    config.name = "mlm"
    config.model.causal = False
    config.train.objective = "masked"
    config.optimizer.learning_rate = 2e-3
    return config
