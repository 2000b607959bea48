"""scikit-learn estimators on a frozen ViT: its representations, and the least-squares head on top of them (Sec. 4.1).

They take images in any form that `vitlab.predict` takes, one each, so that pipelines, cross-validation, grid searches
and every classifier of scikit-learn work on images.

    from vitlab.sklearn import ViTClassifier, ViTFeatures

    cross_val_score(ViTClassifier("S14"), paths, labels, groups=patients, cv=GroupKFold(5))
    make_pipeline(ViTFeatures("S14"), StandardScaler(), LogisticRegression()).fit(paths, labels)
"""

import functools
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Float32
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d

from vitlab.errors import UserError
from vitlab.evaluation.frozen import FrozenModel
from vitlab.evaluation.linear_head import LinearHead, least_squares_head
from vitlab.evaluation.options import FeatureOptions
from vitlab.evaluation.sources import SourceDataset
from vitlab.models.config import Pool
from vitlab.train.distributed import SINGLE
from vitlab.weights.recommended import DEFAULT


@functools.lru_cache(maxsize=4)
def _load(checkpoint: str | Path, options: FeatureOptions, changed: int) -> FrozenModel:
    """The checkpoint, cached. changed: when its files were last changed, so that new ones are loaded."""
    return FrozenModel.load(checkpoint, options, None, lambda _: None, SINGLE)


class ViTFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Images -> the representations of a frozen checkpoint, float32 [n, D], cached by content.

    checkpoint: as `vitlab.load_model` takes it; None is the default of `vitlab list checkpoints`. layer, pool: as in
    `vitlab probe`; `layer="auto"` takes the best for the labels that `fit` is given. image_size: in pixels, default the
    checkpoint's. precision, device: as in `vitlab evaluate`.
    """

    def __init__(
        self,
        checkpoint: str | Path | None = None,
        *,
        layer: int | Literal["auto", "last4"] | None = None,
        pool: Pool | None = None,
        image_size: int | None = None,
        precision: Literal["auto", "float32", "bfloat16"] = "auto",
        device: str = "auto",
        batch_size: int = 64,
    ) -> None:
        self.checkpoint, self.layer, self.pool, self.image_size = checkpoint, layer, pool, image_size
        self.precision, self.device, self.batch_size = precision, device, batch_size

    def fit(self, X: Any, y: Any = None) -> "ViTFeatures":
        """Loads the checkpoint; `layer="auto"` chooses block and pooling by the labels y. Raises UserError without
        them."""
        names = ("layer", "pool", "image_size", "precision", "device", "batch_size")
        options = FeatureOptions(**{name: getattr(self, name) for name in names})
        if self.layer == "auto":
            if y is None:
                raise UserError("layer='auto' chooses by the labels; call fit(X, y), or give a layer.")
            check_consistent_length(X, y)
            classes, labels = np.unique(column_or_1d(y), return_inverse=True)
            model = self._model(options)
            images = SourceDataset.of(X, labels, tuple(map(str, classes)), model.preprocessing.range)
            options = model.at_best_readout(images).options  # `_load` shares the model with clones
        self.options_ = options
        self._n_features_out = self._model(options).width
        return self

    def _model(self, options: FeatureOptions) -> FrozenModel:
        """The checkpoint, which clones of the estimator share."""
        path = Path(self.checkpoint or DEFAULT)
        changed = max((file.stat().st_mtime_ns for file in (path, *path.rglob("*")) if file.exists()), default=0)
        return _load(self.checkpoint or DEFAULT, options, changed)

    def transform(self, X: Any) -> Float32[np.ndarray, "n D"]:
        return self._represent(X)

    def _represent(self, X: Any) -> Float32[np.ndarray, "n D"]:
        check_is_fitted(self)
        model = self._model(self.options_)
        return model.features(SourceDataset.of(X, levels=model.preprocessing.range)).x

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array, tags.requires_fit = False, True, True
        return tags


class ViTClassifier(ClassifierMixin, ViTFeatures):
    """The least-squares head on the representations, whose penalty and scale have the least leave-one-out loss.

    class_weight: `balanced`, or a weight of each class, as in scikit-learn, for the head but not for the choice of
    `layer`; the other parameters are those of `ViTFeatures`. `head_` has the weights and the metrics on images left
    out.
    """

    head_: LinearHead

    def __init__(
        self,
        checkpoint: str | Path | None = None,
        *,
        layer: int | Literal["auto", "last4"] | None = "auto",
        pool: Pool | None = None,
        image_size: int | None = None,
        precision: Literal["auto", "float32", "bfloat16"] = "auto",
        device: str = "auto",
        batch_size: int = 64,
        class_weight: Literal["balanced"] | dict[Any, float] | None = None,
    ) -> None:
        options: dict[str, Any] = {"layer": layer, "pool": pool, "image_size": image_size}
        super().__init__(checkpoint, **options, precision=precision, device=device, batch_size=batch_size)
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any = None) -> "ViTClassifier":
        if y is None:
            raise UserError("a classifier is fitted to labels: call fit(X, y).")
        check_consistent_length(X, y)
        y = column_or_1d(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise UserError("all images have one label; a classifier requires two classes or more.")
        weights = None
        if self.class_weight is not None:
            weights = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
            if (weights <= 0).any():
                raise UserError(f"class_weight is {self.class_weight}; give a positive weight for every class.")
        super().fit(X, y)
        x = self._represent(X)
        self.head_ = least_squares_head(x[None], labels, len(self.classes_), class_weights=weights)
        return self

    def _logits(self, X: Any) -> Float[np.ndarray, "n K"]:
        return self.head_.logits(self._represent(X))

    def decision_function(self, X: Any) -> Float[np.ndarray, "n *K"]:
        """The logits; of two classes, by how much the second is higher."""
        logits = self._logits(X)
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def predict_proba(self, X: Any) -> Float[np.ndarray, "n K"]:
        return softmax(self._logits(X), axis=1)

    def predict(self, X: Any) -> np.ndarray:
        return self.classes_[self._logits(X).argmax(axis=1)]
