"""Data: images in, batches out (Sec. 4.1).

`registry.py` names the data sets, `dataset.py` has their type and parts of them. They come from image folders
(`folder.py`), ImageNet's layouts (`imagenet.py`), files of pixels (`pixels.py`), tars (`shards.py`; on a server
`remote.py`), the Hugging Face hub (`hub.py`) and VTAB-1k's sources (`vtab/`). `decode.py` reads images,
`transforms.py` crops and resizes them, `loader.py` puts them in order.
"""
