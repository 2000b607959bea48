"""Public checkpoints to start from, which `load_model` takes by these names. Imports no torch."""

from typing import NamedTuple

DEFAULT = "timm:vit_small_patch16_224.augreg_in21k"
"""For fine-tuning on two CPU cores or a small GPU: 196 patches, a permissive license."""


class Recommended(NamedTuple):
    """A checkpoint; data and license as its publisher names them."""

    spec: str
    parameters: int
    """Without the head, which fine-tuning replaces."""
    image_size: int
    """Side in pixels of the images that its preprocessing makes."""
    use: str
    pretraining: str
    license: str


_BY_DATA = {
    ("ImageNet-21k", "apache-2.0"): (
        ("timm:vit_tiny_patch16_224.augreg_in21k", 5_524_416, 224, "the smallest; trying things out"),
        ("timm:vit_small_patch32_224.augreg_in21k", 22_493_952, 224, "fast fine-tuning on a CPU"),
        ("timm:vit_small_patch16_224.augreg_in21k", 21_665_664, 224, "fine-tuning on a CPU or a small GPU"),
        ("timm:vit_base_patch32_224.augreg_in21k", 87_455_232, 224, "fine-tuning, a Base with few tokens"),
        ("timm:vit_base_patch16_224.augreg_in21k", 85_798_656, 224, "fine-tuning on a GPU"),
        ("timm:vit_base_patch8_224.augreg_in21k", 85_807_872, 224, "small details; slow"),
        ("timm:vit_large_patch16_224.augreg_in21k", 303_301_632, 224, "fine-tuning on a large GPU"),
        ("timm:vit_base_patch16_224.orig_in21k", 85_798_656, 224, "the paper's own weights"),
        ("timm:vit_base_patch32_224.orig_in21k", 87_455_232, 224, "the paper's own weights, few tokens"),
        ("timm:vit_large_patch16_224.orig_in21k", 303_301_632, 224, "the paper's own weights"),
        ("timm:vit_huge_patch14_224.orig_in21k", 630_764_800, 224, "the paper's largest public weights"),
        ("timm:vit_small_r26_s32_224.augreg_in21k", 36_046_912, 224, "a hybrid; fine-tuning with few tokens"),
        ("timm:vit_base_r50_s16_224.orig_in21k", 97_890_112, 224, "the paper's hybrid"),
        ("timm:vit_large_r50_s32_224.augreg_in21k", 327_969_856, 224, "a large hybrid with few tokens"),
        ("timm:resnetv2_50x1_bit.goog_in21k", 23_500_352, 224, "the paper's baseline, a ResNet (BiT)"),
        ("timm:resnetv2_101x1_bit.goog_in21k", 42_492_480, 224, "the paper's baseline, deeper"),
        (
            "hub:google/vit-base-patch16-224-in21k",
            86_389_248,
            224,
            "Hugging Face's copy, with the paper's layer before the head",
        ),
    ),
    ("ImageNet-21k, ImageNet-1k", "apache-2.0"): (
        ("timm:vit_small_patch16_224.augreg_in21k_ft_in1k", 21_665_664, 224, "ImageNet's classes, fast"),
        ("timm:vit_base_patch16_224.augreg2_in21k_ft_in1k", 85_798_656, 224, "ImageNet's classes"),
        ("timm:vit_base_patch16_384.augreg_in21k_ft_in1k", 86_090_496, 384, "ImageNet's classes, larger images"),
        ("timm:vit_large_patch16_384.augreg_in21k_ft_in1k", 303_690_752, 384, "ImageNet's classes, larger images"),
        ("hub:google/vit-base-patch16-224", 85_798_656, 224, "ImageNet's classes, Hugging Face's copy"),
    ),
    ("ImageNet-22k, ImageNet-1k", "mit"): (
        ("timm:eva02_tiny_patch14_336.mim_in22k_ft_in1k", 5_565_696, 336, "ImageNet's classes, larger images"),
        ("timm:eva02_small_patch14_336.mim_in22k_ft_in1k", 21_748_224, 336, "ImageNet's classes, larger images"),
    ),
    ("ImageNet-1k", "apache-2.0"): (
        ("timm:deit_tiny_patch16_224.fb_in1k", 5_524_416, 224, "ImageNet's classes, the smallest"),
        ("timm:deit_small_patch16_224.fb_in1k", 21_665_664, 224, "ImageNet's classes, from ImageNet-1k alone"),
    ),
    ("ImageNet-22k, ImageNet-1k", "apache-2.0"): (
        ("timm:deit3_small_patch16_224.fb_in22k_ft_in1k", 21_674_496, 224, "ImageNet's classes; fine-tuning"),
        ("timm:deit3_base_patch16_224.fb_in22k_ft_in1k", 85_816_320, 224, "ImageNet's classes; fine-tuning"),
        ("timm:deit3_large_patch16_384.fb_in22k_ft_in1k", 303_738_880, 384, "ImageNet's classes, larger images"),
    ),
    ("ImageNet-1k, no labels", "apache-2.0"): (
        ("timm:vit_small_patch16_224.dino", 21_665_664, 224, "attention maps that follow objects"),
        ("timm:vit_base_patch16_224.dino", 85_798_656, 224, "attention maps; k-NN"),
    ),
    ("LVD-142M, no labels", "apache-2.0"): (
        ("timm:vit_small_patch14_dinov2.lvd142m", 22_056_192, 518, "frozen features (few-shot, probes), fast"),
        ("timm:vit_base_patch14_dinov2.lvd142m", 86_579_712, 518, "frozen features"),
        ("timm:vit_large_patch14_dinov2.lvd142m", 304_367_616, 518, "frozen features on a GPU"),
        ("timm:vit_base_patch14_reg4_dinov2.lvd142m", 86_582_016, 518, "frozen features; smooth attention maps"),
        ("hub:facebook/dinov2-small", 22_056_192, 224, "frozen features at 224 pixels, fast"),
        ("hub:facebook/dinov2-base", 86_579_712, 224, "frozen features at 224 pixels"),
    ),
    ("LVD-1689M, no labels", "dinov3-license"): (
        ("timm:vit_small_patch16_dinov3.lvd1689m", 21_600_768, 256, "frozen features, also of single patches"),
        ("timm:vit_base_patch16_dinov3.lvd1689m", 85_668_864, 256, "frozen features, also of single patches"),
    ),
    ("SAT-493M, no labels", "dinov3-license"): (
        ("timm:vit_large_patch16_dinov3.sat493m", 303_153_152, 256, "satellite images"),
    ),
    ("LAION-2B, with texts", "apache-2.0"): (
        ("timm:vit_base_patch32_clip_224.laion2b", 87_456_768, 224, "features of photographs from the web, fast"),
    ),
    ("DataComp-1B, with texts", "apache-2.0"): (
        ("timm:vit_base_patch16_clip_224.datacompxl", 85_800_192, 224, "features of photographs from the web"),
        ("timm:vit_large_patch14_clip_224.datacompxl", 303_180_800, 224, "features of photographs from the web"),
    ),
    ("LAION-2B, ImageNet-12k, ImageNet-1k", "apache-2.0"): (
        ("timm:vit_base_patch16_clip_224.laion2b_ft_in12k_in1k", 85_800_192, 224, "ImageNet's classes, from CLIP"),
    ),
    ("WebLI, with texts", "apache-2.0"): (
        ("timm:vit_base_patch16_siglip_224.v2_webli", 92_884_224, 224, "features of photographs, attention pooling"),
        ("timm:vit_so400m_patch14_siglip_384.webli", 428_225_600, 384, "features of photographs, larger images"),
    ),
    ("ImageNet-1k, no labels", "cc-by-nc-4.0"): (
        ("timm:vit_base_patch16_224.mae", 85_798_656, 224, "fine-tuning, rather than frozen features"),
    ),
    ("Merged-38M, ImageNet-22k, ImageNet-1k", "mit"): (
        ("timm:eva02_large_patch14_448.mim_m38m_ft_in22k_in1k", 304_078_784, 448, "ImageNet's classes, larger images"),
    ),
    ("Merged-30M, ImageNet-22k, ImageNet-1k", "mit"): (
        ("timm:eva_giant_patch14_336.m30m_ft_in22k_in1k", 1_011_651_584, 336, "ImageNet's classes, the largest here"),
    ),
}
"""(pre-training data, license) -> the other columns."""
RECOMMENDED = tuple(
    Recommended(spec, parameters, image_size, use, *source)
    for source, rows in _BY_DATA.items()
    for spec, parameters, image_size, use in rows
)
