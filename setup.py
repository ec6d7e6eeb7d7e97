"Build script: every value comes from settings.ini."

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

parser = ConfigParser()
parser.read("settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
extras = {k.removesuffix("_requirements"): v.split() for k, v in cfg.items() if k.endswith("_requirements")}

LAB = Path("stabilitylab/workbench/labextensions")  # JupyterLab looks for them in `share/jupyter`
lab_files = [
    (f"share/jupyter/labextensions/{folder.relative_to(LAB).as_posix()}", [path.as_posix() for path in files])
    for folder in sorted({path.parent for path in LAB.rglob("*.*")})
    if (files := sorted(path for path in folder.iterdir() if path.is_file()))
]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    keywords=cfg["keywords"],
    author=cfg["author"],
    license="Apache-2.0",
    url=cfg["git_url"],
    classifiers=["Intended Audience :: Developers", "Programming Language :: Python :: 3"],
    python_requires=f">={cfg['min_python']}",
    packages=find_packages(include=["stabilitylab", "stabilitylab.*"]),
    package_data={
        "stabilitylab": [
            "**/*.c",
            "**/*.js",
            "**/*.md",
            "**/*.css",
            "**/*.json",
            "**/*.toml",
            "**/*.j2",
            "**/*.txt",
            "py.typed",
        ]
    },
    data_files=lab_files,
    install_requires=cfg["requirements"].split(),
    extras_require=extras,
    entry_points={"console_scripts": cfg["console_scripts"].split()},
    long_description=Path("README.md").read_text(encoding="utf-8") if Path("README.md").exists() else "",
    long_description_content_type="text/markdown",
)
