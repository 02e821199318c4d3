"""Write a MIL program as a `.mlpackage`: weights stream into one blob, equal programs give equal bytes.

A package is a folder: `Manifest.json`, which lists its items under UUIDs, `Data/com.apple.CoreML/model.mlmodel`,
the protobuf, and `Data/com.apple.CoreML/weights/weight.bin`.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from pdconvert.lowering.assemble import SPECIFICATION_VERSIONS

ITEMS = {
    "model": ("com.apple.CoreML/model.mlmodel", "CoreML Model Specification", "model.mlmodel"),
    "weights": ("com.apple.CoreML/weights", "CoreML Model Weights", "weights"),
}
MODEL = "Data/com.apple.CoreML/model.mlmodel"
"""Where the program lies in a package."""

NAMESPACE = uuid.UUID("6d0b1f0e-6d2c-5d7b-9b35-8a3f8e3f1c11")
"""Fixed, so that the item identifiers of a package depend on nothing."""


def write_package(folder: Path, program: Any, target: str, metadata: dict[str, str]) -> None:
    """Write `program` as the package `folder`, which must not exist.

    No MIL pass is run: the lowering writes the program in the form that is shipped, and a pass of coremltools
    could undo it (for instance by folding the constants).

    Args:
        program: `coremltools.converters.mil.mil.Program`.
        target: "iOS16", "iOS17" or "iOS18"; sets the specification version.
        metadata: user-defined strings of the model description.
    """
    from coremltools.converters.mil.backend.mil.load import CoreMLProtoExporter

    data = folder / "Data" / "com.apple.CoreML"
    weights = data / "weights"
    weights.mkdir(parents=True)
    version = SPECIFICATION_VERSIONS[target]
    functions = _exporter()(program, str(weights), version).export()
    unused = dict.fromkeys(
        (
            "predicted_feature_name",
            "predicted_probabilities_name",
            "classifier_config",
            "convert_to",
            "convert_from",
        )
    )
    model = CoreMLProtoExporter(program, functions, specification_version=version, **unused).export(version)
    for key, value in sorted(metadata.items()):
        model.description.metadata.userDefined[key] = value
    (data / "model.mlmodel").write_bytes(model.SerializeToString(deterministic=True))
    identifiers = {item: str(uuid.uuid5(NAMESPACE, item)).upper() for item in ITEMS}
    entries = {
        identifiers[item]: {
            "author": "com.apple.CoreML",
            "description": description,
            "name": name,
            "path": path,
        }
        for item, (path, description, name) in ITEMS.items()
    }
    manifest = {
        "fileFormatVersion": "1.0.0",
        "itemInfoEntries": entries,
        "rootModelIdentifier": identifiers["model"],
    }
    (folder / "Manifest.json").write_text(json.dumps(manifest, indent=4, sort_keys=True) + "\n")


def _exporter() -> type:
    """coremltools' exporter, in which constants of one `weight_id` share their bytes whatever shapes they have."""
    from coremltools.converters.mil.backend.mil.helper import create_file_value_tensor
    from coremltools.converters.mil.backend.mil.load import MILProtoExporter

    class Exporter(MILProtoExporter):
        def create_file_value(self, var: Any) -> Any:
            stored = super().create_file_value(var)
            sizes = [dimension.constant.size for dimension in stored.type.tensorType.dimensions]
            if sizes == list(var.val.shape):
                return stored
            place, dtype = stored.blobFileValue, stored.type.tensorType.dataType
            return create_file_value_tensor(place.fileName, place.offset, var.val.shape, dtype)

    return Exporter
