"""The public names of the package. Type checkers and `vescale_fsdp.lazy` read this list."""

from vescale_fsdp.checkpoint.async_save import SaveHandle as SaveHandle, async_save as async_save
from vescale_fsdp.checkpoint.native.read_state import (
    CheckpointReader as CheckpointReader,
    read_state as read_state,
)
from vescale_fsdp.checkpoint.fingerprint import fingerprint as fingerprint
from vescale_fsdp.checkpoint.manifest.fingerprints import (
    Fingerprint as Fingerprint,
    TensorFingerprint as TensorFingerprint,
)
from vescale_fsdp.checkpoint.foreign import SourceOptions as SourceOptions
from vescale_fsdp.checkpoint.load import LoadReport as LoadReport, load as load
from vescale_fsdp.checkpoint.manager import CheckpointManager as CheckpointManager, Restored as Restored
from vescale_fsdp.checkpoint.memory.ram_tier import RamTier as RamTier
from vescale_fsdp.checkpoint.save import save as save
from vescale_fsdp.checkpoint.state.per_rank import PerRank as PerRank
from vescale_fsdp.checkpoint.steps.retention import RetentionPolicy as RetentionPolicy
from vescale_fsdp.checkpoint.steps.save_policy import (
    BeforeDeadline as BeforeDeadline,
    BestOf as BestOf,
    EveryMinutes as EveryMinutes,
    EverySteps as EverySteps,
    OnSignal as OnSignal,
    SavePolicy as SavePolicy,
)
from vescale_fsdp.checkpoint.steps.step_folders import latest as latest
from vescale_fsdp.checkpoint.storage.progress import ProgressReport as ProgressReport
from vescale_fsdp.checkpoint.verify import verify as verify
from vescale_fsdp.checkpoint.verify_report import VerifyReport as VerifyReport
