"""XGBoost with a callback after each round; with an argument, with the lines that `run` prints."""

import sys
import time

import numpy
import xgboost
from own_log import SECONDS, begin_step, end_job, end_step

IS_INSTRUMENTED = "instrumented" in sys.argv
if IS_INSTRUMENTED:
    from exporter import training


class Log(xgboost.callback.TrainingCallback):
    def before_iteration(self, model, epoch, evals_log):
        begin_step()
        return False

    def after_iteration(self, model, epoch, evals_log):
        time.sleep(SECONDS)
        loss = evals_log["train"]["rmse"][-1]
        if IS_INSTRUMENTED:
            training.step()
            training.record(loss=loss, samples=200)
        end_step(loss, 200)
        return False


examples = xgboost.DMatrix(numpy.random.rand(200, 8), numpy.random.rand(200))
xgboost.train(
    {"objective": "reg:squarederror"},
    examples,
    40,
    evals=[(examples, "train")],
    callbacks=[Log()],
    verbose_eval=False,
)
if not IS_INSTRUMENTED:
    time.sleep(25)  # `run` prints its message after 20 s
end_job()
